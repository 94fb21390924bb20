"""Tensors whose values are loaded later: operators that only move or cast elements are recorded on them."""
