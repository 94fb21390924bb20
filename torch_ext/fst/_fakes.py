"""What the graph-friendly operators return, as far as a compiler needs to know: it comes from the headers alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

import fst._library  # noqa: F401  (registers the operators)


def _like(read_headers: Callable[[], list[Tensor]], device: torch.device | str) -> list[Tensor]:
    """Fake tensors on `device`, shaped like the tensors without data that `read_headers` returns."""
    # Under the fake mode the operator would be this very function again.
    with unset_fake_temporarily():
        stored = [(tensor.shape, tensor.dtype) for tensor in read_headers()]
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in stored]


def _load_tensors(
    paths: Sequence[str],
    names: Sequence[str],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return _like(lambda: torch.ops.fst.load_tensors(paths, names, "meta", dtype=dtype), device)


def _load_slices(
    paths: Sequence[str],
    names: Sequence[str],
    dims: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return _like(lambda: torch.ops.fst.load_slices(paths, names, dims, starts, lengths, "meta", dtype=dtype), device)


def _load_into(paths: Sequence[str], names: Sequence[str], out: Sequence[Tensor]) -> None:
    # PyTorch calls this for meta tensors too, and returning would leave those beside them unfilled without a word.
    for name, tensor in zip(names, out, strict=False):
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            raise ValueError(f'[invalid-argument] tensor "{name}": the output is on meta; nothing was written')
    # Nothing else to say: shapes stay, so a program can be compiled where its checkpoint is not.


torch.library.register_fake("fst::load_tensors", _load_tensors)
torch.library.register_fake("fst::load_slices", _load_slices)
torch.library.register_fake("fst::load_into", _load_into)
