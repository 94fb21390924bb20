"""Recipes: rules that make the tensors of a load from the tensors of a checkpoint."""
