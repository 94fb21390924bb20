"""The bench: workloads x peers x states x destinations, each measured in a process of its own.

`make bench` runs it in a checkout. `pip install ./benches` adds the command `fst-bench` beside an installed fst.
"""
