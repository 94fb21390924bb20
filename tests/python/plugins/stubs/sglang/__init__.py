"""Stub of the parts of SGLang that fst uses, for machines without it."""
