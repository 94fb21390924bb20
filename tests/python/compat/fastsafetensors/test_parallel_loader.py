"""`ParallelLoader`: iteration, filters, windows, budgets and the progress bar."""

import pytest
import torch

import fst
from fastsafetensors_helpers import rows
from fst.compat import fastsafetensors as compat

pytestmark = pytest.mark.usefixtures("directory")


def test_repeated_iteration():
    files = ["a.safetensors", "b.safetensors"]
    loader = compat.ParallelLoader(None, files, use_tqdm_on_load=False, tensor_filter=lambda name: name > "b")
    for _ in range(2):
        weights = dict(loader.iterate_weights())
        assert weights.keys() == {"b0", "b1"}
        assert torch.equal(weights["b0"], rows())
    loader.close()


@pytest.fixture
def streams(monkeypatch):
    """Records opened streams with their options."""
    opened = []
    real = fst.stream

    def stream(*arguments, **options):
        opened.append((real(*arguments, **options), options))
        return opened[-1][0]

    monkeypatch.setattr(fst, "stream", stream)
    return opened


def test_closed_iterator_ends_stream(streams):
    weights = compat.ParallelLoader(None, ["b.safetensors"]).iterate_weights()
    next(weights)
    weights.close()
    [(stream, _)] = streams
    assert list(stream) == []


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
def test_window_bytes(streams, options, window_bytes):
    loader = compat.ParallelLoader(None, ["a.safetensors", "b.safetensors"], use_tqdm_on_load=False, **options)
    assert len(list(loader.iterate_weights())) == 3
    assert streams[0][1]["window_bytes"] == window_bytes


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, A0 + B0 + B1),
        ({"accumulate_resident": False}, 2 * A0),
        ({"resident_tensor": lambda name: name != "b1"}, A0 + B0 + 2 * B1),
    ],
)
def test_insufficient_budgets(options, needed):
    files = ["a.safetensors", "b.safetensors"]
    compat.ParallelLoader(None, files, device_memory_budget=needed, **options)
    with pytest.raises(compat.BudgetInfeasibleError, match=f"is {needed - 1} bytes, but {needed} are needed"):
        compat.ParallelLoader(None, files, device_memory_budget=needed - 1, **options)


def test_residents_require_accumulation():
    with pytest.raises(ValueError, match="resident_tensor"):
        compat.ParallelLoader(None, [], accumulate_resident=False, resident_tensor=lambda _: True)


def test_progress_bar(capsys):
    pytest.importorskip("tqdm")
    for shown in (True, False):
        loader = compat.ParallelLoader(None, ["a.safetensors"], use_tqdm_on_load=shown)
        list(loader.iterate_weights())
        assert ("100%" in capsys.readouterr().err) is shown
