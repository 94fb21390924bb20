"""Benchmark of saves by several ranks."""
