"""Loads by the ranks of a process group, each byte read once."""
