"""Data sets and comparisons for the tests of `fst.compat.unifiedefficientloader`."""

import torch
from torch.utils.data import Dataset


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=0, atol=0)


class Pictures(Dataset):
    """Pictures with labels. Each picture is filled with its label."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index
