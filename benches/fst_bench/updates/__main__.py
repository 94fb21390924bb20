"""Runs the measurement: `python -m fst_bench.updates`."""

from .run import main

main()
