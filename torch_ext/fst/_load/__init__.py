"""Loads of whole checkpoints, of named tensors and of streams by one process."""
