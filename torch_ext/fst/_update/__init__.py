"""Updates of live weights, and deltas between versions of a checkpoint."""
