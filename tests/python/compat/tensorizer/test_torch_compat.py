"""`torch_compat`: torch.save and torch.load with tensors in a separate file."""

import importlib
import io
import os
import pickle
import threading

import pytest
import torch

import fst
from fst.compat.tensorizer import torch_compat
from fst.compat.tensorizer._pickling import Source
from rawfile import assert_all_same, assert_same
from tensorizer_helpers import DEVICES


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_save_and_load_objects(model, zipped, device):
    base = torch.arange(10.0)
    saved = {
        "model": model,
        "views": (base, base[2:5], base[::2]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(5, dtype=torch.float64),
        "complex": torch.randn(5, dtype=torch.complex128),
        "half": torch.randn(3).half(),
        "empty": torch.empty(0, 4),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(4, dtype=torch.uint8).untyped_storage(),
        "text": {"step": 3},
    }
    with torch_compat.tensorizer_saving():
        torch.save(saved, "any.pt", _use_new_zipfile_serialization=zipped)
    with torch_compat.tensorizer_loading(device=device):
        found = torch.load("any.pt", map_location=device, weights_only=False)
    assert len(fst.load_file("any.pt.tensors")) > 10
    assert_all_same(found["model"].state_dict(), model.state_dict())
    assert found["model"].head.weight is found["model"].embedding.weight
    for key in ("bytes", "wide", "half", "empty"):
        assert_same(found[key].cpu(), saved[key])
    assert torch.equal(found["complex"].cpu(), saved["complex"])
    assert torch.equal(found["sparse"].to_dense().cpu(), torch.eye(3))
    assert found["meta"].is_meta
    assert found["text"] == {"step": 3}
    whole, part, strided = found["views"]
    whole.zero_()
    assert part.sum() == strided.sum() == 0
    assert bytes(found["storage"].tolist()) == bytes(range(4))


def test_files_without_tensors_beside_them(model):
    with torch_compat.tensorizer_saving():
        torch.save({"step": 3}, "plain.pt")
    assert not os.path.exists("plain.pt.tensors")
    torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(device="cpu"):
        assert torch.load("plain.pt") == {"step": 3}
        assert_all_same(torch.load("model.pt"), model.state_dict())


def test_unnamed_files(model):
    buffer = io.BytesIO()
    with torch_compat.tensorizer_saving(), pytest.warns(UserWarning, match="no name"):
        torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    with torch_compat.tensorizer_loading(), pytest.warns(UserWarning, match="no name"):
        assert_all_same(torch.load(buffer), model.state_dict())
    with open("model.pt", "wb") as file, torch_compat.tensorizer_saving():
        torch.save(model.state_dict(), file)
    with open("model.pt", "rb") as file, torch_compat.tensorizer_loading(device="cpu"):
        assert_all_same(torch.load(file), model.state_dict())


def test_functions_that_name_the_file(model):
    def tensors_path(f):
        return f.replace(".pt", "-data.tensors") if isinstance(f, str) else None

    buffer = io.BytesIO()
    with torch_compat.tensorizer_saving(tensors_path):
        torch.save(model.state_dict(), "model.pt")
        torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert set(os.listdir()) == {"model.pt", "model-data.tensors"}
    assert_all_same(torch.load(buffer), model.state_dict())
    with torch_compat.tensorizer_loading(tensors_path, device="cpu"):
        assert_all_same(torch.load("model.pt"), model.state_dict())


def test_weights_only(model):
    with torch_compat.tensorizer_saving():
        torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(device="cpu"), pytest.raises(RuntimeError, match="pickle_module"):
        torch.load("model.pt", weights_only=True)
    with torch_compat.tensorizer_loading(device="cpu", suppress_weights_only=True):
        assert_all_same(torch.load("model.pt", weights_only=True), model.state_dict())


def test_other_pickle_modules_and_versions_are_refused(model):
    other = importlib.import_module("copyreg")
    with torch_compat.tensorizer_saving(), pytest.raises(ValueError, match="copyreg"):
        torch.save(model.state_dict(), "model.pt", pickle_module=other)
    torch.save(model.state_dict(), "model.pt")
    with torch_compat.tensorizer_loading(), pytest.raises(ValueError, match="copyreg"):
        torch.load("model.pt", pickle_module=other)
    with pytest.raises(pickle.UnpicklingError, match="newer program"):
        Source(list)._storage_of(("TensorizerPickler", 1, "storage", 0, None))


def test_blocks_nest_and_affect_one_thread(model):
    original = torch.save, torch.load
    state_dict = model.state_dict()

    def other_thread():
        torch.save(state_dict, "other.pt")

    with torch_compat.tensorizer_saving("outer.tensors"):
        with torch_compat.tensorizer_saving("inner.tensors"), torch_compat.tensorizer_loading():
            torch.save(state_dict, "inner.pt")
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
            kept = torch.save
        torch.save(state_dict, "outer.pt")
    assert (torch.save, torch.load) == original
    kept(state_dict, "after.pt")
    assert {"inner.tensors", "outer.tensors"} <= set(os.listdir())
    assert not {"other.pt.tensors", "after.pt.tensors"} & set(os.listdir())
    for plain in ("other.pt", "after.pt"):
        assert_all_same(torch.load(plain), state_dict)
