"""Updates of live weights."""
