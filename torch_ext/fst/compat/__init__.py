"""Public names of other loaders, implemented with fst, for programs that change only the import."""
