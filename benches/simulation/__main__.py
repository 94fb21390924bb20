"""`python -m benches.simulation`."""

from .run import main

main()
