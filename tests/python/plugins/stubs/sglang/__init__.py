"""As much of SGLang as fst relies on, under the same names, for where it cannot be installed."""
