"""Stub of the parts of vLLM that fst uses, for machines without it."""
