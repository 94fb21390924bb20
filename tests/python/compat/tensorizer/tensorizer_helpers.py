"""Models and comparisons for the tests of `fst.compat.tensorizer`."""

from collections.abc import Mapping
from contextlib import closing

import pytest
import torch

from fst.compat import tensorizer

ON_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


DEVICES = ["cpu", ON_GPU]


class Model(torch.nn.Module):
    """Tied and frozen parameters, persistent and non-persistent buffers, and a parameter that is None."""

    def __init__(self, device=None):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3, device=device))
        self.embedding = torch.nn.Embedding(10, 4, device=device)
        self.norm = torch.nn.BatchNorm1d(4, device=device)
        self.head = torch.nn.Linear(4, 10, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.randn(2, device=device), requires_grad=False)
        self.register_buffer("positions", torch.arange(5, device=device), persistent=False)
        self.register_parameter("nothing", None)


def tensors_of(module):
    """Returns all parameters and buffers of a module. Tied parameters appear under each name."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def assert_same_tree(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        for one, other in zip(found, expected, strict=True):
            assert_same_tree(one, other)
    else:
        assert isinstance(found, Mapping)
        assert found.keys() == expected.keys()
        for key, branch in expected.items():
            assert_same_tree(found[key], branch)


def save(path, state_dict, library=tensorizer, encryption=None):
    """Writes a state dict with a library."""
    with closing(library.TensorSerializer(path, encryption=encryption)) as serializer:
        serializer.write_state_dict(state_dict)


def save_module(path, module, library=tensorizer, encryption=None):
    """Writes a module with a library."""
    with closing(library.TensorSerializer(path, encryption=encryption)) as serializer:
        serializer.write_module(module)


def both_libraries(original):
    return ((original, "theirs.tensors"), (tensorizer, "ours.tensors"))
