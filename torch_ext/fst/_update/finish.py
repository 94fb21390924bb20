"""Effects of a load beside the memory of tensors."""

import torch
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from fst._distributed.dtensors import is_dtensor
from fst._module.hooks import call_post_hooks
from fst._update.prepared import Request


def finish_load(common: Request, keys: _IncompatibleKeys | None) -> None:
    """Does what a load does beside writing to memory."""
    for _, tensor in common.named:
        # The update wrote to the local tensor, while autograd checks the version of the DTensor.
        if is_dtensor(tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    if isinstance(common.target, Module):
        call_post_hooks(common.target, keys or _IncompatibleKeys([], []))
