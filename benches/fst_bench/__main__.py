"""Runs the benchmarks: `python -m fst_bench` is the command `fst-bench`."""

from .run import main

main()
