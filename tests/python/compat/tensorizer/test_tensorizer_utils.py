"""Utilities and public names of `fst.compat.tensorizer`."""

import threading

import pytest
import torch

from fst.compat.tensorizer import utils
from tensorizer_helpers import Model


def test_no_init_or_tensor():
    model = utils.no_init_or_tensor(Model)
    assert model.embedding.weight.is_meta
    assert not model.positions.is_meta
    with pytest.raises(TypeError, match="not int"):
        utils.no_init_or_tensor(3)
    with utils.no_init_or_tensor(), utils.no_init_or_tensor():
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.empty(1)))
        thread.start()
        thread.join()
        assert torch.empty(1).is_meta
    assert not made[0].is_meta
    assert not torch.empty(1).is_meta
