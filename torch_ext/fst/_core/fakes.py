"""Fake (meta) implementations of the operators. Loads read only headers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

import fst._core.library  # noqa: F401  (registers the operators)

Device = torch.device | str

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Length of `bytes` of which a program is compiled for any.
_UNBOUNDED = 1 << 62


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


def _refuse_meta(operator: Any, tensors: Iterable[Tensor | None], *arguments: Any, **options: Any) -> None:
    """Raises the error of a kernel if tensors are on meta: PyTorch calls fakes for these, too."""
    if any(tensor is not None and tensor.is_meta and not isinstance(tensor, FakeTensor) for tensor in tensors):
        operator.default.redispatch(_CPU_KEYS, *arguments, **options)


def _load_into(paths: Sequence[str], names: Sequence[str], out: Sequence[Tensor], *, verify: str = "") -> None:
    # Returning would silently leave the other outputs unfilled.
    _refuse_meta(torch.ops.fst.load_into, out, paths, names, out, verify=verify)
    # Shapes do not change, so programs can be compiled without the checkpoint.


def _load_recipe_into(
    paths: Sequence[str], names: Sequence[str], rules: Sequence[str], out: Sequence[Tensor], *, verify: str = ""
) -> None:
    _refuse_meta(torch.ops.fst.load_recipe_into, out, paths, names, rules, out, verify=verify)


def _verify(paths: Sequence[str], verify: str = "digests") -> None:
    """Returns nothing: programs can be compiled without the checkpoint."""


def _save_file(
    tensors: Sequence[Tensor], names: Sequence[str], path: str, *, metadata: dict[str, str] | None = None
) -> None:
    # Returning would look like a successful save.
    _refuse_meta(torch.ops.fst.save_file, tensors, tensors, names, path, metadata=metadata)


def _serialize(tensors: Sequence[Tensor], names: Sequence[str], *, metadata: dict[str, str] | None = None) -> Tensor:
    device = "meta" if any(tensor.is_meta and not isinstance(tensor, FakeTensor) for tensor in tensors) else "cpu"
    with unset_fake_temporarily():
        # The header contains the sizes as text, so the program is specialized to them.
        metas = [torch.empty([int(size) for size in t.shape], dtype=t.dtype, device="meta") for t in tensors]
        # Calls the operator itself, not this function, which is its kernel for the device "meta".
        size = torch.ops.fst.serialize.default.redispatch(_CPU_KEYS, metas, names, metadata=metadata).numel()
    return torch.empty(size, dtype=torch.uint8, device=device)


def _cast(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    with unset_fake_temporarily():
        # The kernel refuses dtypes, also on meta.
        metas = [torch.empty(0, dtype=tensor.dtype, layout=tensor.layout, device="meta") for tensor in tensors]
        torch.ops.fst.cast.default.redispatch(_CPU_KEYS, metas, dtype=dtype)
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
    with unset_fake_temporarily():
        # The kernel checks the arguments. A length that is not known yet is checked when the program runs.
        length = bytes.numel() if isinstance(bytes.numel(), int) else _UNBOUNDED
        meta = torch.empty((length, *bytes.shape[1:]), dtype=bytes.dtype, device="meta")
        results = torch.ops.fst.scatter.default.redispatch(_CPU_KEYS, meta, offsets, dtypes, sizes, ranks, dtype=dtype)
    return [bytes.new_empty(result.shape, dtype=result.dtype) for result in results]


for _name in ("load_file", "load_files", "load_tensors", "load_slices", "load_boxes", "load_recipe"):
    torch.library.register_fake(f"fst::{_name}", _fake_load(getattr(torch.ops.fst, _name)))

for _name, _function in (
    ("load_into", _load_into),
    ("load_recipe_into", _load_recipe_into),
    ("verify", _verify),
    ("save_file", _save_file),
    ("serialize", _serialize),
    ("cast", _cast),
    ("scatter", _scatter),
):
    torch.library.register_fake(f"fst::{_name}", _function)
