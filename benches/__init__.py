"""The bench: workloads x peers x states x destinations, each measured in a process of its own.

In the repository it is the package `benches`, in an installed wheel `fst_bench`, with the command `fst-bench`.
"""
