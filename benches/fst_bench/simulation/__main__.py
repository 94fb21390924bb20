"""Runs the simulation: `python -m fst_bench.simulation`."""

from .run import main

main()
