"""Experiments on a GPU, each of which decides how loads copy, pin, allocate or wait."""
