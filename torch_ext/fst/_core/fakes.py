"""Fake (meta) implementations of the operators. Loads read only headers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

import fst._core.library  # noqa: F401  (registers the operators)
from fst._core.dtypes import CASTABLE, DTYPES

Device = torch.device | str

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _fake_load(operator: Any) -> Callable[..., Any]:
    """Returns the fake of an operator that loads: its own arguments come first, as in the schema."""
    own = next(index for index, argument in enumerate(operator.default._schema.arguments) if argument.name == "device")

    def fake(*args: Any, device: Device = "cpu", verify: str = "", **dtypes: Any) -> Any:
        arguments, device = args[:own], args[own] if len(args) > own else device
        # Under the fake mode the call would dispatch to the fake again.
        with unset_fake_temporarily():
            stored = operator(*arguments, "meta", **dtypes)
        if isinstance(stored, dict):
            return {name: _fake(tensor, device) for name, tensor in stored.items()}
        return [_fake(tensor, device) for tensor in stored]

    return fake


def _fake(stored: Tensor, device: Device) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def _load_into(paths: Sequence[str], names: Sequence[str], out: Sequence[Tensor], *, verify: str = "") -> None:
    # PyTorch also calls fakes for meta tensors. Returning would silently leave the other outputs unfilled.
    for name, tensor in zip(names, out, strict=False):
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            raise ValueError(f'[invalid-argument] tensor "{name}": the output is on meta; nothing was written')
    # Shapes do not change, so programs can be compiled without the checkpoint.


def _write_changes(targets: Sequence[Tensor], positions: Sequence[Tensor | None], values: Sequence[Tensor]) -> None:
    # PyTorch also calls fakes for meta tensors. Returning would look like a write.
    for index, change in enumerate(zip(targets, positions, values, strict=False)):
        if any(tensor is not None and tensor.is_meta and not isinstance(tensor, FakeTensor) for tensor in change):
            raise ValueError(f"[invalid-argument] change {index}: a tensor is on meta; nothing was written")


def _verify(paths: Sequence[str], verify: str = "digests") -> None:
    """Returns nothing: programs can be compiled without the checkpoint."""


def _save_file(
    tensors: Sequence[Tensor], names: Sequence[str], path: str, *, metadata: dict[str, str] | None = None
) -> None:
    # PyTorch also calls fakes for meta tensors. Returning would look like a successful save.
    for name, tensor in zip(names, tensors, strict=False):
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            raise ValueError(f'[invalid-argument] tensor "{name}": is on meta, and has no values to save')


def _serialize(tensors: Sequence[Tensor], names: Sequence[str], *, metadata: dict[str, str] | None = None) -> Tensor:
    device = "meta" if any(tensor.is_meta and not isinstance(tensor, FakeTensor) for tensor in tensors) else "cpu"
    with unset_fake_temporarily():
        # The header contains the sizes as text, so the program is specialized to them.
        metas = [torch.empty([int(size) for size in t.shape], dtype=t.dtype, device="meta") for t in tensors]
        # Calls the operator itself, not this function, which is its kernel for the device "meta".
        size = torch.ops.fst.serialize.default.redispatch(_CPU_KEYS, metas, names, metadata=metadata).numel()
    return torch.empty(size, dtype=torch.uint8, device=device)


def _cast(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=dtype, device=tensor.device) for tensor in tensors]


def _scatter(
    bytes: Tensor,
    offsets: Sequence[int],
    dtypes: Sequence[int],
    sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    results = []
    ends = list(itertools.accumulate(ranks))
    # The operator checks the arguments when it runs.
    for begin, end, number in zip([0, *ends], ends, dtypes, strict=False):
        stored = DTYPES[number]
        final = dtype if dtype is not None and stored in CASTABLE else stored
        results.append(bytes.new_empty(sizes[begin:end], dtype=final))
    return results


for _name in ("load_file", "load_files", "load_tensors", "load_slices", "load_boxes"):
    torch.library.register_fake(f"fst::{_name}", _fake_load(getattr(torch.ops.fst, _name)))

for _name, _function in (
    ("load_into", _load_into),
    ("_write_changes", _write_changes),
    ("verify", _verify),
    ("save_file", _save_file),
    ("serialize", _serialize),
    ("cast", _cast),
    ("scatter", _scatter),
):
    torch.library.register_fake(f"fst::{_name}", _function)
