"""`IncrementalSafetensorsWriter`: batches, headers, failures and blocks."""

import pytest
import torch
from safetensors.torch import load_file

from fst.compat import unifiedefficientloader as uel
from unifiedefficientloader_helpers import assert_equal


def test_write_batch_and_write_dict(tensors):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        uel.IncrementalSafetensorsWriter("sub/directory/copy.safetensors", max_workers=1) as writer,
    ):
        keys = loader.keys()
        for batch in loader.async_stream(keys[:10], batch_size=4):
            writer.write_batch(batch)
        writer.write_dict({key: loader.get_tensor(key) for key in keys[10:]})
    assert_equal(load_file("sub/directory/copy.safetensors"), tensors)


def test_overwrite_loaded_file(tensors):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        uel.IncrementalSafetensorsWriter("model.safetensors") as writer,
    ):
        for key in loader.keys():  # noqa: SIM118
            writer.write(key, loader.get_tensor(key))
    assert_equal(load_file("model.safetensors"), tensors)


def test_failure_keeps_old_file(tensors, tmp_path):
    before = sorted(tmp_path.iterdir())

    def fail():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            raise ZeroDivisionError

    def write_twice():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            writer.write("w", torch.ones(3))

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ValueError, match="'w' has already been written"):
        write_twice()
    assert sorted(tmp_path.iterdir()) == before
    assert_equal(load_file("model.safetensors"), tensors)


def test_write_outside_block():
    writer = uel.IncrementalSafetensorsWriter("m.safetensors")
    with pytest.raises(RuntimeError, match="Must be used within a context manager"):
        writer.write("w", torch.ones(3))
    for _ in range(2):
        with writer:
            writer.write("w", torch.ones(3))
    with pytest.raises(RuntimeError, match="Must be used within a context manager"):
        writer.write("v", torch.ones(3))
