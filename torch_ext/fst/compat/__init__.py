"""The public names of other loaders, over fst: change the import, keep the program."""
