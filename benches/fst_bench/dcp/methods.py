"""Measured ways to perform an action by all ranks, by the names of the action and of the way."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import fst.dcp

# Performs an action on the state dict of this rank, and on the checkpoint in a folder.
Run = Callable[[dict[str, Any], str], None]


class Method(NamedTuple):
    """Way to perform an action.

    Attributes:
        title: Title in tables.
        run: Performs the action, on every rank.
    """

    title: str
    run: Run


def _load_with_fst(state: dict[str, Any], folder: str) -> None:
    load(state, storage_reader=fst.dcp.StorageReader(folder))


def _load_with_pytorch(state: dict[str, Any], folder: str) -> None:
    load(state, storage_reader=HuggingFaceStorageReader(folder))


# The first way of each action is that of fst, and the goals compare it with the others.
METHODS: Mapping[str, Mapping[str, Method]] = {
    "load": {
        "fst": Method("`fst.dcp.StorageReader`", _load_with_fst),
        "pytorch": Method("`HuggingFaceStorageReader`", _load_with_pytorch),
    }
}
