"""`python -m benches.ranks`."""

from .run import main

main()
