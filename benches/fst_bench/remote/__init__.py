"""Benchmarks of remote checkpoints on the loopback device: fst and its peers."""
