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


def _from_headers(operator: Callable[..., Any], *args: object, **dtypes: Any) -> Any:
    """Calls the operator for the device "meta"."""
    # Under the fake mode the call would dispatch to the fake again.
    with unset_fake_temporarily():
        return operator(*args, "meta", **dtypes)


def _fake(stored: Tensor, device: Device) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def _load_file(path: str, device: Device = "cpu", *, verify: str = "", **dtypes: Any) -> dict[str, Tensor]:
    return _load_files([path], device, **dtypes)


def _load_files(paths: Sequence[str], device: Device = "cpu", *, verify: str = "", **dtypes: Any) -> dict[str, Tensor]:
    stored = _from_headers(torch.ops.fst.load_files, paths, **dtypes)
    return {name: _fake(tensor, device) for name, tensor in stored.items()}


def _load_tensors(
    paths: Sequence[str],
    names: Sequence[str],
    device: Device = "cpu",
    *,
    verify: str = "",
    **dtypes: Any,
) -> list[Tensor]:
    stored = _from_headers(torch.ops.fst.load_tensors, paths, names, **dtypes)
    return [_fake(tensor, device) for tensor in stored]


def _load_slices(
    paths: Sequence[str],
    names: Sequence[str],
    dims: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: Device = "cpu",
    *,
    verify: str = "",
    **dtypes: Any,
) -> list[Tensor]:
    stored = _from_headers(torch.ops.fst.load_slices, paths, names, dims, starts, lengths, **dtypes)
    return [_fake(tensor, device) for tensor in stored]


def _load_boxes(
    paths: Sequence[str],
    names: Sequence[str],
    starts: Sequence[int],
    lengths: Sequence[int],
    steps: Sequence[int],
    device: Device = "cpu",
    *,
    verify: str = "",
    **dtypes: Any,
) -> list[Tensor]:
    stored = _from_headers(torch.ops.fst.load_boxes, paths, names, starts, lengths, steps, **dtypes)
    return [_fake(tensor, device) for tensor in stored]


def _load_into(paths: Sequence[str], names: Sequence[str], out: Sequence[Tensor], *, verify: str = "") -> None:
    # PyTorch also calls fakes for meta tensors. Returning would silently leave the other outputs unfilled.
    for name, tensor in zip(names, out, strict=False):
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            raise ValueError(f'[invalid-argument] tensor "{name}": the output is on meta; nothing was written')
    # Shapes do not change, so programs can be compiled without the checkpoint.


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


for _name, _function in (
    ("load_file", _load_file),
    ("load_files", _load_files),
    ("load_tensors", _load_tensors),
    ("load_slices", _load_slices),
    ("load_boxes", _load_boxes),
    ("load_into", _load_into),
    ("verify", _verify),
    ("save_file", _save_file),
    ("serialize", _serialize),
    ("cast", _cast),
    ("scatter", _scatter),
):
    torch.library.register_fake(f"fst::{_name}", _function)
