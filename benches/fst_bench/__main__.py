"""`python -m fst_bench` in the repository, `python -m fst_bench` or `fst-bench` with an installed wheel."""

from .run import main

main()
