"""`SafeTensorsFileLoader` of a single process: headers, tensors, names and arguments."""

import logging
from pathlib import Path

import pytest
import torch

from fastsafetensors_helpers import load, rows
from fst.compat import fastsafetensors as compat
from groups import FakeGroup

pytestmark = pytest.mark.usefixtures("files")


def test_files_of_several_ranks(files, caplog):
    loader = compat.SafeTensorsFileLoader(None, use_fgds=True)
    with caplog.at_level(logging.DEBUG, logger="fst.compat.fastsafetensors"):
        loader.add_filenames({0: files, 1: [Path("experts.safetensors")]})
    assert "rank 0 reads a.safetensors, which has 1 tensors" in caplog.text
    with pytest.raises(IsADirectoryError, match="name the files one by one"):
        loader.add_filenames({0: ["."]})
    buffer = loader.copy_files_to_device(use_buf_register=False)
    # The first file of each rank precedes the second files.
    assert next(iter(buffer.key_to_rank_lidx)) == "a0"
    assert list(buffer.key_to_rank_lidx)[-2:] == ["b1", "b0"]
    assert [buffer.key_to_rank_lidx[name] for name in ("a0", "b0", "router")] == [(0, 0), (0, 1), (1, 0)]


def test_tensors_of_one_rank():
    buffer = load()
    for dim in (-1, 0, 1, -2):
        assert torch.equal(buffer.get_sharded("a0", dim), rows())
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f'"a0" has 2 dimensions and cannot be split along dimension {dim}'):
            buffer.get_sharded("a0", dim)
    assert buffer.get_tensor("a0") is buffer.get_tensor(tensor_name="a0")
    for error in (KeyError, ValueError):
        with pytest.raises(error, match='no file that was loaded holds "none"'):
            buffer.get_tensor("none")


@pytest.mark.gpu
def test_devices():
    loader = compat.SafeTensorsFileLoader(None, 0)
    loader.add_filenames({0: ["a.safetensors"]})
    buffer = loader.copy_files_to_device()
    tensor = buffer.get_tensor("a0")
    assert tensor.device == torch.device("cuda:0")
    buffer.close()
    assert torch.equal(tensor.cpu(), rows())


def test_closed_loader():
    with compat.SafeTensorsFileLoader(None, debug_log=True) as loader, loader.copy_files_to_device() as buffer:
        assert buffer.key_to_rank_lidx == {}
    loader.add_filenames({0: ["a.safetensors"]})
    loader.close()
    loader.add_filenames({0: ["b.safetensors"]})
    assert sorted(loader.copy_files_to_device().key_to_rank_lidx) == ["b0", "b1"]


def test_invalid_arguments():
    for group in (-100, FakeGroup(2), "world"):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            compat.SafeTensorsFileLoader(group)
    assert compat.SafeTensorsFileLoader(FakeGroup(1), torch.device("meta")).device == torch.device("meta")
    with pytest.raises(NotImplementedError, match='Unknown framework name: "paddle"'):
        compat.SafeTensorsFileLoader(None, framework="paddle")
