"""Dequantization by PyTorch's operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _unpack(codes: Tensor) -> Tensor:
    table = torch.tensor(_E2M1, device=codes.device)
    codes = codes.contiguous().view(torch.uint8)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)


def dequantize_into(
    codes: Tensor, scales: Tensor, out: Tensor, scheme: str, *, block: Sequence[int] = (), begin: Sequence[int] = ()
) -> None:
    """Writes the numbers of codes to `out`."""
    if scheme == "mxfp4":
        values = _unpack(codes)
        exponents = (scales.int() - 127).repeat_interleave(32, -1)
        out.copy_(torch.ldexp(values.to(out.dtype), exponents))
        return
    values = _unpack(codes) if scheme == "fp4" else codes.float()
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    rows = (torch.arange(out.shape[-2]) + begin[0]) // block[0]
    columns = (torch.arange(out.shape[-1]) + begin[1]) // block[1]
    out.copy_((values * factors[..., rows, :][..., columns]).to(out.dtype))
