"""Real servers for the tests only, besides those of `fst_bench.servers`, which the benchmarks use too."""
