"""Runs the experiments: `python -m fst_bench.experiments`, or `make gpu-experiments`."""

from ..run import main

main("experiments")
