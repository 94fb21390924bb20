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


def numbers_shape(codes: Tensor, scales: Tensor, scheme: str) -> list[int]:
    """Returns the shape of the numbers of valid codes."""
    shape = list(codes.shape)
    if scheme == "mxfp4" and codes.dim() == scales.dim() + 1:
        shape[-2:] = [shape[-2] * shape[-1]]
    return shape if scheme == "scale" else [*shape[:-1], shape[-1] * 2]


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    scheme: str,
    *,
    block: Sequence[int] | None = None,
    global_scale: Tensor | None = None,
    begin: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tensors = [codes, scales] if global_scale is None else [codes, scales, global_scale]
    options = {"block": block, "global_scale": global_scale, "begin": begin, "dtype": dtype}
    if not codes.is_meta:
        _refuse_meta(torch.ops.fst.dequantize, tensors, codes, scales, scheme, **options)
    if all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        with unset_fake_temporarily():
            # The kernel checks the arguments.
            metas = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
            options["global_scale"] = None if global_scale is None else metas[2]
            result = torch.ops.fst.dequantize.default.redispatch(_CPU_KEYS, *metas[:2], scheme, **options)
            shape = list(result.shape)
    else:
        # Sizes that are not known yet are checked when the program runs.
        shape = numbers_shape(codes, scales, scheme)
    return torch.empty(shape, dtype=dtype or torch.bfloat16, device=codes.device)


def _quantize(tensor: Tensor, scheme: str, *, block: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    sizes = [size if isinstance(size, int) else 1 for size in tensor.shape]
    with unset_fake_temporarily():
        # The kernel checks the arguments.
        meta = torch.empty(sizes, dtype=tensor.dtype, device="meta")
        codes, scales = torch.ops.fst.quantize.default.redispatch(_CPU_KEYS, meta, scheme, block=block)
    *leading, rows, columns = tensor.shape
    grid = [-(-size // each) if each else 1 for size, each in zip((rows, columns), block or (1, 0), strict=True)]
    return (
        torch.empty(tensor.shape, dtype=codes.dtype, device=tensor.device),
        torch.empty([*leading, *grid], dtype=scales.dtype, device=tensor.device),
    )


def _dequantize_into(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    scheme: str,
    *,
    block: Sequence[int] | None = None,
    global_scale: Tensor | None = None,
    begin: Sequence[int] | None = None,
) -> None:
    options = {"block": block, "global_scale": global_scale, "begin": begin}
    # Returning would silently leave the output unfilled.
    _refuse_meta(torch.ops.fst.dequantize_into, [out, codes, scales], codes, scales, out, scheme, **options)


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
    ("dequantize", _dequantize),
    ("dequantize_into", _dequantize_into),
    ("quantize", _quantize),
):
    torch.library.register_fake(f"fst::{_name}", _function)
