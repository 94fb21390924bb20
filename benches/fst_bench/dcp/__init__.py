"""Benchmark of checkpoints that ranks load through `torch.distributed.checkpoint`."""
