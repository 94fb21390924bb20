"""Loaders of a single process: headers, tensors, filters, arguments, windows and budgets."""

import logging
from pathlib import Path

import pytest
import torch

import fst
from fastsafetensors_helpers import load, rows
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType
from groups import FakeGroup
from rawfile import assert_same

pytestmark = pytest.mark.usefixtures("files")


def test_wrapped_tensors():
    wrapped = TensorBase(torch.arange(6.0).reshape(2, 3))
    assert wrapped.to().get_raw() is wrapped.get_raw()
    assert wrapped.device == Device()
    with pytest.raises(NotImplementedError, match="F6_E2M3"):
        wrapped.to(dtype=DType.F6_E2M3)
    with pytest.raises(TypeError, match="dtype must be"):
        wrapped.to(dtype="F16")


def test_files_of_several_ranks(files, caplog):
    loader = compat.SafeTensorsFileLoader(None)
    with caplog.at_level(logging.DEBUG, logger="fst.compat.fastsafetensors"):
        loader.add_filenames({0: files, 1: [Path("experts.safetensors")]})
    assert "rank 0 reads a.safetensors, which has 1 tensors" in caplog.text
    with pytest.raises(IsADirectoryError, match="name the files one by one"):
        loader.add_filenames({0: ["."]})
    buffer = loader.copy_files_to_device()
    assert buffer.get_filename("b1") == "b.safetensors"
    assert loader.get_shape("b1") == buffer.get_shape("b1") == [2, 3]
    assert [buffer.key_to_rank_lidx[name] for name in ("a0", "b0", "router")] == [(0, 0), (0, 1), (1, 0)]
    # The first file of each rank precedes the second files.
    assert list(loader.meta) == ["a.safetensors", "experts.safetensors", "b.safetensors"]


def test_tensors_of_one_rank():
    buffer = load()
    for dim in (-1, 0, 1, -2):
        assert torch.equal(buffer.get_sharded("a0", dim), rows())
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f'"a0" has 2 dimensions and cannot be split along dimension {dim}'):
            buffer.get_sharded("a0", dim)
    assert torch.equal(buffer.push_tensor("a0", 0), rows())
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


def test_tensor_filter(files):
    loader = compat.SafeTensorsFileLoader(None)
    loader.set_tensor_filter(lambda name: name != "b0")
    loader.add_filenames({0: files})
    with fst.profile() as profile:
        buffer = loader.copy_files_to_device(borrowed_tensors=True)
    assert profile.summary().tensors == 2
    assert loader.get_keys() == list(buffer.key_to_rank_lidx) == ["a0", "b1"]
    with pytest.raises(ValueError, match='leaves out "b0"'):
        loader.get_shape("b0")
    for get in (buffer.get_tensor, buffer.get_shape, buffer.get_filename):
        for error in (KeyError, ValueError):
            with pytest.raises(error, match='no file that was loaded holds "b0"'):
                get("b0")
    loader.set_tensor_filter(None)
    assert "b0" in loader.get_keys()
    loader.reset()
    loader.add_filenames({0: ["b.safetensors"]})
    assert sorted(loader.copy_files_to_device().key_to_rank_lidx) == ["b0", "b1"]


def test_no_files():
    with compat.SafeTensorsFileLoader(None, debug_log=True) as loader, loader.copy_files_to_device() as buffer:
        assert list(buffer.key_to_rank_lidx) == []
    assert list(compat.ParallelLoader(None, []).iterate_weights()) == []


@pytest.mark.parametrize(
    "open_with",
    [
        lambda group: compat.fastsafe_open("a.safetensors", pg=group),
        lambda group: compat.ParallelLoader(group, ["a.safetensors"]),
    ],
)
def test_invalid_process_groups(open_with):
    for group in (-100, FakeGroup(2), "world"):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            open_with(group)
    open_with(FakeGroup(1))


def test_frameworks_and_devices():
    assert Device.from_str("cuda:1") == Device(DeviceType.CUDA, 1)
    assert Device(DeviceType.CUDA, 1).as_str() == "cuda:1"
    assert Device.from_str("CPU") == Device()
    assert compat.SafeTensorsFileLoader(None, torch.device("cuda")).device == Device(DeviceType.CUDA)
    assert compat.SafeTensorsFileLoader(None, 3).device == Device(DeviceType.CUDA, 3)
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


@pytest.mark.parametrize(
    "filenames",
    ["a.safetensors", Path("a.safetensors"), ["a.safetensors"], ("a.safetensors",), {0: ["a.safetensors"]}],
)
def test_fastsafe_open_paths(filenames):
    with compat.fastsafe_open(filenames, nogds=True, device="cpu", debug_log=True) as file:
        assert file.keys() == ["a0"]
        assert file.metadata() == {"a.safetensors": {"format": "pt"}}
        tensor = file.get_tensor("a0")
    assert torch.equal(tensor, rows())


def test_repeated_iteration(files, streams):
    loader = compat.ParallelLoader(None, files, use_tqdm_on_load=False, tensor_filter=lambda name: name > "b")
    for _ in range(2):
        weights = dict(loader.iterate_weights())
        assert weights.keys() == {"b0", "b1"}
        assert torch.equal(weights["b0"], rows())
    loader.close()
    weights = compat.ParallelLoader(FakeGroup(8), files, max_concurrent_producers=1, all_local=True).iterate_weights()
    assert next(weights)[0] == "a0"
    weights.close()
    # The closed iterator has ended its stream.
    assert list(streams[-1][0]) == []


A0, B0, B1 = 256, 256, 48


@pytest.mark.parametrize(
    ("options", "window_bytes"),
    [
        ({}, 512 << 20),
        ({"max_batch_bytes": 1000}, 1000),
        ({"device_memory_budget": A0 + B0 + B1}, 512 << 20),
        ({"device_memory_budget": 1000, "accumulate_resident": False}, 1000 - A0),
        ({"device_memory_budget": 1000, "resident_tensor": lambda name: name != "b1"}, 1000 - A0 - B0 - B1),
        ({"device_memory_budget": 1000, "accumulate_resident": False, "max_batch_bytes": 500}, 500),
    ],
)
def test_window_bytes(files, streams, options, window_bytes):
    loader = compat.ParallelLoader(None, files, use_tqdm_on_load=False, **options)
    assert len(list(loader.iterate_weights())) == 3
    assert streams[0][1] == window_bytes


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, A0 + B0 + B1),
        ({"accumulate_resident": False}, 2 * A0),
        ({"resident_tensor": lambda name: name != "b1"}, A0 + B0 + 2 * B1),
    ],
)
def test_insufficient_budgets(files, options, needed):
    compat.ParallelLoader(None, files, device_memory_budget=needed, **options)
    with pytest.raises(ValueError, match="resident_tensor selects"):
        compat.ParallelLoader(None, [], accumulate_resident=False, resident_tensor=lambda _: True)
    with pytest.raises(compat.BudgetInfeasibleError, match=f"is {needed - 1} bytes, but {needed} are needed"):
        compat.ParallelLoader(None, files, device_memory_budget=needed - 1, **options)


def test_progress_bar(capsys):
    pytest.importorskip("tqdm")
    for shown in (True, False):
        loader = compat.ParallelLoader(None, ["a.safetensors"], use_tqdm_on_load=shown)
        list(loader.iterate_weights())
        assert ("100%" in capsys.readouterr().err) is shown
