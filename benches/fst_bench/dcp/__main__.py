"""Runs the measurement: `python -m fst_bench.dcp`."""

from .run import main

main()
