"""Entry points through which other programs load fst if it is installed, one module for each program."""
