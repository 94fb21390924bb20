"""Headers, devices, wrapped tensors and helper functions of `fst.compat.fastsafetensors`."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fastsafetensors_helpers import load
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.common import is_gpu_found
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType

pytestmark = pytest.mark.usefixtures("directory")


def test_metadata():
    metadata = compat.SafeTensorsMetadata.from_file("b.safetensors", get_framework_op("pytorch"))
    content = Path("b.safetensors").read_bytes()
    assert metadata.size_bytes == len(content)
    assert metadata.header_length == 8 + int.from_bytes(content[:8], "little")
    assert metadata.metadata == {}
    frame = metadata.tensors["b1"]
    assert (frame.dtype, frame.shape, frame.strides) == (DType.I64, [2, 3], [3, 1])
    begin, end = (metadata.header_length + offset for offset in frame.data_offsets)
    assert content[begin:end] == torch.arange(6).numpy().tobytes()
    assert metadata.select_byte_ranges(lambda name: name == "b1") == [(begin, end)]
    assert metadata.select_byte_ranges(lambda _: True) == [(metadata.header_length, len(content))]
    assert metadata.select_byte_ranges(lambda _: False) == []


def test_byte_ranges_with_gaps():
    save_file({name: torch.zeros(1) for name in "abcd"}, "gaps.safetensors")
    metadata = compat.SafeTensorsMetadata.from_file("gaps.safetensors")
    first = metadata.header_length
    assert metadata.select_byte_ranges(lambda name: name in "acd", 3) == [(first, first + 4), (first + 8, first + 16)]
    assert metadata.select_byte_ranges(lambda name: name in "acd", 4) == [(first, first + 16)]


@given(st.integers(0, 300), st.integers(1, 40))
def test_owned_expert_ranges(experts, ranks):
    owned = [range(*compat.owned_expert_range(experts, ranks, rank)) for rank in range(ranks)]
    assert [expert for run in owned for expert in run] == list(range(experts))
    counts = [len(run) for run in owned]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_invalid_expert_ranks(size, rank):
    with pytest.raises(ValueError, match=r"ep_(size|rank) must be"):
        compat.owned_expert_range(4, size, rank)


def test_device_names():
    assert Device.from_str("cuda:1") == Device(DeviceType.CUDA, 1)
    assert Device(DeviceType.CUDA, 1).as_str() == "cuda:1"
    assert Device.from_str("CPU") == Device()
    assert compat.SafeTensorsFileLoader(None, torch.device("cuda")).device == Device(DeviceType.CUDA)
    assert compat.SafeTensorsFileLoader(None, 3).device == Device(DeviceType.CUDA, 3)


def test_wrapped_tensors():
    wrapped = TensorBase(torch.arange(6.0).reshape(2, 3))
    assert wrapped.to().get_raw() is wrapped.get_raw()
    assert wrapped.view(DType.AUTO) is wrapped
    assert wrapped.view(DType.I32).get_raw().dtype == torch.int32
    assert wrapped.reshape([3, 2]).get_shape() == [3, 2]
    assert wrapped[1].get_raw().tolist() == [3.0, 4.0, 5.0]
    assert wrapped.clone().data_ptr() != wrapped.data_ptr() == wrapped.detach().data_ptr()
    assert TensorBase(wrapped.get_raw().T).contiguous().get_raw().is_contiguous()
    assert wrapped.device == Device()
    with pytest.raises(NotImplementedError, match="F6_E2M3"):
        wrapped.to(dtype=DType.F6_E2M3)
    with pytest.raises(TypeError, match="dtype must be"):
        wrapped.to(dtype="F16")


def test_no_live_allocations():
    buffer = load()
    assert compat.live_allocation_count() == compat.live_allocation_bytes() == 0
    buffer.close()


def test_numa_node_without_gpu():
    assert compat.get_device_numa_node(None) is None
    assert is_gpu_found() == torch.cuda.is_available()


def test_debug_shows_logs(fork_python):
    program = "from fst.compat.fastsafetensors.common import set_debug; import logging; set_debug(); "
    program += "import sys; sys.stderr = sys.stdout; set_debug(); logging.getLogger('x').debug('seen')"
    assert fork_python(program) == "[DEBUG] seen\n"
