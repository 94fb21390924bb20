"""Loads and saves by all ranks of a process group."""
