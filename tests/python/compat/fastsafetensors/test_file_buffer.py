"""`SafeTensorsFileLoader`, its buffer, and `fastsafe_open`, without a process group."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from fastsafetensors_helpers import load, rows
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType
from groups import FakeGroup
from rawfile import DTYPES, assert_same, random_raw, write

pytestmark = pytest.mark.usefixtures("directory")


def test_every_dtype(tmp_path):
    raws = {dtype: random_raw(dtype, (3, 4)) for dtype in DTYPES}
    write(tmp_path / "all.safetensors", raws)
    buffer = load(["all.safetensors"])
    for dtype, raw in raws.items():
        assert_same(buffer.get_tensor(dtype), raw.tensor())
        wrapped = buffer.get_tensor_wrapped(dtype)
        assert wrapped.dtype is DType(dtype)
        assert wrapped.get_shape() == buffer.get_shape(dtype) == [3, 4]
        assert wrapped.get_nbytes() == len(raw.data)


def test_tensors_outlive_loader_and_files(directory):
    with compat.SafeTensorsFileLoader(None, "cpu") as loader:
        loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
        buffer = loader.copy_files_to_device(borrowed_tensors=True)
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        buffer.close()
        buffer.close()
    for name in ("a.safetensors", "b.safetensors"):
        (directory / name).unlink()
    del buffer, loader
    gc.collect()
    assert torch.equal(tensors["a0"], rows())
    assert torch.equal(tensors["b0"], rows())
    assert torch.equal(tensors["b1"], torch.arange(6).reshape(2, 3))


def test_tensors_are_independent():
    buffer = load()
    buffer.get_tensor("b0").zero_()
    assert torch.equal(buffer.get_tensor("b1"), torch.arange(6).reshape(2, 3))
    assert torch.equal(load().get_tensor("b0"), rows())


def test_closed_buffer():
    buffer = load()
    buffer.close()
    with pytest.raises(RuntimeError, match=r'"a0" was requested after close\(\)'):
        buffer.get_tensor("a0")
    assert buffer.get_shape("a0") == [16, 8]


def test_locations_of_tensors():
    loader = compat.SafeTensorsFileLoader(None)
    loader.add_filenames({0: ["a.safetensors", "b.safetensors"], 1: [Path("experts.safetensors")]})
    buffer = loader.copy_files_to_device()
    assert buffer.get_filename("b1") == "b.safetensors"
    assert loader.get_shape("b1") == buffer.get_shape("b1") == [2, 3]
    assert buffer.key_to_rank_lidx["a0"] == (0, 0)
    assert buffer.key_to_rank_lidx["b0"] == (0, 1)
    assert buffer.key_to_rank_lidx["router"] == (1, 0)
    # The first file of each rank precedes the second files.
    assert list(loader.meta) == ["a.safetensors", "experts.safetensors", "b.safetensors"]


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_unknown_names(error):
    buffer = load()
    for get in (buffer.get_tensor, buffer.get_shape, buffer.get_filename):
        with pytest.raises(error, match='no file that was loaded holds "c0"'):
            get("c0")


def test_sharded_tensors_of_one_rank():
    buffer = load()
    for dim in (-1, 0, 1, -2):
        assert torch.equal(buffer.get_sharded("a0", dim), rows())
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f'"a0" has 2 dimensions and cannot be split along dimension {dim}'):
            buffer.get_sharded("a0", dim)
    assert torch.equal(buffer.push_tensor("a0", 0), rows())


def test_several_tensors():
    buffer = load()
    assert [(name, tuple(tensor.shape)) for name, tensor in buffer.iter_local_tensors(["b1", "a0"])] == [
        ("b1", (2, 3)),
        ("a0", (16, 8)),
    ]
    tensors = buffer.as_dict({"a0": -1, "b1": 0})
    assert list(tensors) == ["a0", "b1"]
    assert torch.equal(tensors["b1"].get_raw(), torch.arange(6).reshape(2, 3))
    joined = buffer.get_multi_cols(["b0", "a0"], dim=1, dtype=DType.F32)
    assert isinstance(joined, TensorBase)
    assert torch.equal(joined.get_raw(), torch.cat([rows(), rows()], 1).float())
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        buffer.get_multi_cols(["a0", "b1"], dim=1)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64, DType.I8, torch.float32])
def test_dtype_of_all_tensors(dtype):
    expected_dtype = (
        dtype if isinstance(dtype, torch.dtype) else TensorBase(torch.empty(0)).to(dtype=dtype).get_raw().dtype
    )
    buffer = load(dtype=dtype)
    for name, tensor in {**load_file("a.safetensors"), **load_file("b.safetensors")}.items():
        assert_same(buffer.get_tensor(name), tensor.to(expected_dtype))


def test_device_and_dtype_of_one_tensor():
    buffer = load()
    tensor = buffer.get_tensor("b1", device=Device.from_str("cpu"), dtype=DType.F32)
    assert_same(tensor, torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert buffer.get_tensor("a0") is buffer.get_tensor("a0", device="cpu", dtype=DType.F16)


@pytest.mark.gpu
def test_devices():
    loader = compat.SafeTensorsFileLoader(None, Device(DeviceType.CUDA, 0))
    loader.add_filenames({0: ["a.safetensors"]})
    buffer = loader.copy_files_to_device()
    tensor = buffer.get_tensor("a0")
    assert tensor.device == torch.device("cuda:0")
    assert buffer.get_tensor("a0", device="cpu").device.type == "cpu"
    buffer.close()
    assert torch.equal(tensor.cpu(), rows())
    assert compat.get_device_numa_node(0) is None or compat.get_device_numa_node(0) >= 0


def test_tensor_filter():
    loader = compat.SafeTensorsFileLoader(None)
    loader.set_tensor_filter(lambda name: name != "b0")
    loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
    with fst.profile() as profile:
        buffer = loader.copy_files_to_device()
    assert profile.summary().tensors == 2
    assert loader.get_keys() == list(buffer.key_to_rank_lidx) == ["a0", "b1"]
    with pytest.raises(ValueError, match='leaves out "b0"'):
        loader.get_shape("b0")
    with pytest.raises(ValueError, match="b0"):
        buffer.get_tensor("b0")
    loader.set_tensor_filter(None)
    assert "b0" in loader.get_keys()
    loader.reset()
    loader.add_filenames({0: ["b.safetensors"]})
    assert sorted(loader.copy_files_to_device().key_to_rank_lidx) == ["b0", "b1"]


def test_no_files():
    assert list(load([]).key_to_rank_lidx) == []
    assert list(compat.ParallelLoader(None, []).iterate_weights()) == []


def test_logs(caplog):
    with caplog.at_level(logging.DEBUG, logger="fst.compat.fastsafetensors"):
        load(["a.safetensors"])
    assert "rank 0 reads a.safetensors, which has 1 tensors" in caplog.text


@pytest.mark.parametrize(
    "open_with",
    [
        lambda group: compat.fastsafe_open("a.safetensors", pg=group),
        lambda group: compat.PipelineParallel(group, compat.SafeTensorsFileLoader(None), ["a.safetensors"]),
    ],
)
def test_invalid_process_groups(open_with):
    for group in (-100, FakeGroup(2), "world"):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            open_with(group)
    open_with(FakeGroup(1))


def test_all_local():
    loader = compat.ParallelLoader(FakeGroup(8), ["a.safetensors"], all_local=True, use_tqdm_on_load=False)
    assert [name for name, _ in loader.iterate_weights()] == ["a0"]


def test_unknown_frameworks_and_devices():
    with pytest.raises(NotImplementedError, match='Unknown framework name: "paddle"'):
        compat.SafeTensorsFileLoader(None, framework="paddle")
    for device, message in [
        ("npu", "Unknown device type: npu"),
        ("npu:0", "Unknown device type: npu"),
        ("cuda:-x", "Invalid index: -x"),
        ("cuda:", "Invalid index: "),
    ]:
        with pytest.raises(ValueError, match=message):
            compat.SafeTensorsFileLoader(None, device)


def test_name_in_two_files():
    save_file({"a0": torch.ones(1)}, "again.safetensors")
    with pytest.raises(fst.SafetensorError, match="a0"):
        load(["a.safetensors", "again.safetensors"])


def test_invalid_files_are_refused_when_added():
    Path("cut.safetensors").write_bytes(Path("a.safetensors").read_bytes()[:-1])
    loader = compat.SafeTensorsFileLoader(None)
    with pytest.raises(fst.SafetensorError, match=r"cut\.safetensors"):
        loader.add_filenames({0: ["cut.safetensors"]})
    with pytest.raises(FileNotFoundError):
        loader.add_filenames({0: ["none.safetensors"]})
    with pytest.raises(IsADirectoryError, match="name the files one by one"):
        loader.add_filenames({0: ["."]})


@pytest.mark.parametrize(
    "filenames",
    ["a.safetensors", Path("a.safetensors"), ["a.safetensors"], ("a.safetensors",), {0: ["a.safetensors"]}],
)
def test_fastsafe_open_paths(filenames):
    with compat.fastsafe_open(filenames) as file:
        assert file.keys() == ["a0"]
        assert file.metadata() == {"a.safetensors": {"format": "pt"}}
        tensor = file.get_tensor("a0")
        assert file.get_tensor_wrapped("a0").get_raw() is tensor
    assert torch.equal(tensor, rows())
