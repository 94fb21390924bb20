"""Runs the benchmarks of several ranks: `python -m fst_bench.ranks`."""

from .run import main

main()
