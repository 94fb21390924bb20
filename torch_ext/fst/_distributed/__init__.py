"""Loads by all ranks of a process group, which read each byte once."""
