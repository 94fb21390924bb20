"""Initialization of CUDA."""

import torch


def init() -> None:
    """Initializes CUDA if it is available. Otherwise the first load does so."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
