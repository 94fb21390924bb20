"""Devices, wrapped tensors and helper functions of `fst.compat.fastsafetensors`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import TensorBase
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType


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


def test_machine():
    assert compat.live_allocation_count() == compat.live_allocation_bytes() == 0
    assert compat.get_device_numa_node(None) is None
