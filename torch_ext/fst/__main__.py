"""`python -m fst` is the command `fst`."""

from fst.cli import main

main()
