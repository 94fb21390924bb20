"""Runs the benchmarks of remote checkpoints: `python -m fst_bench.remote`."""

from .run import main

main()
