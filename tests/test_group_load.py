"""Loads that ranks do together, as a load by one process and slicing give them."""

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fst._group_load import load_wants, open_together
from fst._ranks import Ranks
from fst._wants import Chunk, Want

CPU = torch.device("cpu")


def load_chunk(path, dim):
    ranks = Ranks.of(None, CPU)
    [tensor] = load_wants(open_together(path, ranks), [Want("a", Chunk(dim))], ranks, CPU)
    expected = torch.load(path + ".pt").chunk(ranks.size, dim)
    if dist.get_rank() < len(expected):
        torch.testing.assert_close(tensor, expected[ranks.rank], rtol=0, atol=0)
    else:
        assert tensor.shape[dim] == 0
    return tuple(tensor.shape)


def test_chunks(ranks, tmp_path):
    tensor = torch.randn(5, 7)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    torch.save(tensor, tmp_path / "a.safetensors.pt")
    assert ranks(3).run(load_chunk, str(tmp_path / "a.safetensors"), 0) == [(2, 7), (2, 7), (1, 7)]
    assert ranks(3).run(load_chunk, str(tmp_path / "a.safetensors"), -1) == [(5, 3), (5, 3), (5, 1)]
