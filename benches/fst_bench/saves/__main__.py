"""Runs the measurement: `python -m fst_bench.saves`."""

from .run import main

main()
