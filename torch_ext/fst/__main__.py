"""Entry point of `python -m fst`: the command `fst`, after an import of PyTorch. See `fst_command`."""

from fst.cli import main

main()
