"""Real servers for the tests only, besides `fst_bench.servers`, which the benchmarks use too."""
