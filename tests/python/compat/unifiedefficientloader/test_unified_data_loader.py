"""`UnifiedDataLoader`, and dictionaries in tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from fst.compat import unifiedefficientloader as uel


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
def test_round_trip_of_dictionaries(value):
    tensor = uel.dict_to_tensor(value)
    assert uel.tensor_to_dict(tensor) == uel.tensor_to_dict(tensor.numpy()) == value


def test_invalid_encoded_dictionaries():
    array = uel.dict_to_tensor({"a": 1}).numpy()
    for wrong in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.uint8), array.reshape(1, -1), array.astype("int16")):
        with pytest.raises(ValueError, match="1D tensor of uint8"):
            uel.tensor_to_dict(wrong)


class Pictures(Dataset):
    """Pictures with labels. Each picture is filled with its label."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_data_loader_matches_pytorch(num_workers, drop_last):
    ours = uel.UnifiedDataLoader(
        Pictures(), batch_size=7, num_workers=num_workers, prefetch_batches=3, pin_memory=True, drop_last=drop_last
    )
    expected = list(DataLoader(Pictures(), batch_size=7, drop_last=drop_last))
    assert len(ours) == len(expected)
    assert (ours.batch_size, ours.num_workers, ours.prefetch_batches) == (7, num_workers, 3)
    assert (ours.shuffle, ours.pin_memory, ours.drop_last) == (False, True, drop_last)
    for _ in range(2):
        for found, batch in zip(ours, expected, strict=True):
            torch.testing.assert_close(found, batch)
    with pytest.raises(KeyError, match="0"):
        next(iter(uel.UnifiedDataLoader({1: 2, 3: 4})))


@pytest.mark.gpu
def test_gpu_batches_are_ready_and_independent():
    loader = uel.UnifiedDataLoader(Pictures(), batch_size=8, direct_gpu=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            kept = list(loader)
            torch.cuda.synchronize()
        assert torch.cat([pictures[:, 0, 0, 0] for pictures, _ in kept]).tolist() == list(range(100))


def test_shuffled_batches():
    batches = list(uel.UnifiedDataLoader(Pictures(), batch_size=32, shuffle=True, direct_gpu=True))
    assert {batch.is_cuda for pair in batches for batch in pair} == {torch.cuda.is_available()}
    for pictures, labels in batches:
        assert torch.equal(pictures[:, 0, 0, 0].long(), labels)
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(100))
