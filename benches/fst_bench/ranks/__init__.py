"""Benchmarks of loads by several ranks on one machine: fst and its peers."""
