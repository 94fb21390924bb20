"""Benchmark of updates of live models."""
