"""Work that is done once in a process."""

import torch


def init() -> None:
    """Starts CUDA, where there is any. The first load does so otherwise."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
