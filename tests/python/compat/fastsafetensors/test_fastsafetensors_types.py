"""Devices, wrapped tensors, the framework and helper functions of `fst.compat.fastsafetensors`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsafetensors_helpers import load
from fst._core.dtypes import TORCH_DTYPES
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.common import is_gpu_found
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType

pytestmark = pytest.mark.usefixtures("directory")


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


def test_copies_to_memory():
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    memory = bytearray(14)
    TensorBase(tensor.T).copy_to_buffer(memoryview(memory))
    assert memory == tensor.T.contiguous().numpy().tobytes() + bytes(2)
    TensorBase(tensor[:0]).copy_to_buffer(memoryview(b""))


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.value in TORCH_DTYPES])
def test_dtypes_of_framework(dtype):
    op = get_framework_op("torch")
    wrapped = op.get_empty_tensor([2, 4], dtype, Device())
    assert (wrapped.dtype, wrapped.get_shape()) == (dtype, [2, 4])
    assert wrapped.get_nbytes() == 8 * op.get_dtype_size(dtype)
    assert op.get_native_shape(dtype, [2, 4]) == list(wrapped.get_raw().shape)
    assert op.concat_tensors([wrapped, wrapped], 1).get_shape() == [2, 8]


def test_tensors_of_framework():
    op = get_framework_op("pytorch")
    tensor = torch.arange(4.0)
    wrapped = op.wrap_tensor(tensor)
    assert wrapped.get_raw() is tensor
    copy = op.get_empty_tensor([4], DType.F32, Device())
    op.copy_tensor(copy, wrapped)
    assert op.is_equal(copy, tensor)
    assert not op.is_equal(copy, tensor + 1)
    with pytest.raises(TypeError, match="expected a tensor, not list"):
        op.is_equal(copy, [0.0])
    shared = op.from_dlpack(torch.utils.dlpack.to_dlpack(tensor), Device(), DType.F32)
    assert shared.data_ptr() == tensor.data_ptr()
    assert op.randn((2, 3), Device(), DType.F16).get_raw().unique().numel() > 1


def test_packed_indices_of_framework():
    op = get_framework_op("pytorch")
    whole = slice(None)
    assert op.get_native_slices(DType.F4, [8, 16], (whole, slice(4, -2))) == (whole, slice(2, 7, 1))
    assert op.get_native_slices(DType.F4, [8, 16], (0, 4)) == (0, 2)
    for unchanged in [(DType.F4, [8, 16], (slice(3, 6),)), (DType.F32, [16], (slice(3, 6, 2),))]:
        assert op.get_native_slices(*unchanged) == unchanged[2]
    for split in (slice(3, 12), slice(2, 5), slice(0, 8, 2), 3):
        with pytest.raises(ValueError, match="would split"):
            op.get_native_slices(DType.F4, [8, 16], (whole, split))
    for shape in ([], [8, 15]):
        with pytest.raises(ValueError, match="must be even"):
            op.get_native_shape(DType.F4, shape)


def test_framework_without_gpu():
    op = get_framework_op("pytorch")
    assert op.get_device("cuda:1") == Device(DeviceType.CUDA, 1)
    op.set_device(Device())
    op.synchronize(Device())
    op.synchronize_current_stream(Device())
    assert (op.get_global_rank(), op.get_mem_used(), op.get_device_ptr_align(), op.support_fp8()) == (0, 0, 16, True)
    if not torch.cuda.is_available():
        assert (op.get_device_name(0), op.get_cuda_ver()) == ("", "0.0")


@pytest.mark.gpu
def test_framework_with_gpu():
    op = get_framework_op("pytorch")
    device = Device(DeviceType.CUDA, 0)
    op.set_device(device)
    tensor = op.randn((4,), device, DType.F32)
    op.synchronize(device)
    op.synchronize_current_stream(device)
    assert tensor.device == device
    assert op.get_device_name(0) == torch.cuda.get_device_name(0)
    assert op.get_cuda_ver().partition("-")[0] in ("cuda", "hip")


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
