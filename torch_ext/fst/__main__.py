"""Entry point of `python -m fst`, the same program as the command `fst`."""

from fst.cli import main

main()
