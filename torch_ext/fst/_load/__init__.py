"""Loads and streams by one process, and casts of loaded tensors."""
