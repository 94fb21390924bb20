"""`python -m fst_bench.ranks`."""

from .run import main

main()
