"""Runs the measurement: `python -m fst_bench.small_calls`."""

from .run import main

main()
