"""Benchmarks of fst: workloads x peers x cache states x devices, each measured in a separate process.

`make bench` runs it in a checkout. `pip install ./benches` adds the command `fst-bench` beside an installed fst.
"""
