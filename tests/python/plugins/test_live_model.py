"""Updates of a server's model in place: the places of tensors, chains of deltas, and ranks."""

import pytest
import torch
import torch.distributed as dist

import fst
from fst._core import ops
from fst._core.group import Group, RankError
from fst.plugins import _live_model
from fst.plugins._layout import NotInPlaceError, find_parts
from live import Fp8LinearMethod, LiveModel, assert_equal_models, loaded, save_weights

ALONE = Group.alone(torch.device("cpu"))


def meta(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def test_parts_are_regions_that_the_model_copies(tmp_path):
    tensors = save_weights(tmp_path / "m", 0)
    model = loaded(tensors, rank=1, size=2)
    before = [parameter.clone() for parameter in model.parameters()]
    parts = {part.name: part for part in find_parts(model, meta(tensors))}
    assert parts.keys() == tensors.keys() - {"inv_freq"}
    for part in parts.values():
        assert torch.equal(part.tensor, part.region(ALONE).view(tensors[part.name]))
        assert part.is_whole is (part.name == "norm")
    assert parts["k"].tensor.data_ptr() == model.qkv.weight[4:].data_ptr()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_models_that_do_more_than_copy_are_refused(tmp_path):
    def derive(model, tensor):
        model.doubled = model.norm * 2

    def replace(model, tensor):
        model.norm.data = torch.ones(6)

    tensors = save_weights(tmp_path / "m", 0)
    for name, loading, message in [
        ("norm", lambda model, tensor: model.norm.data.copy_(tensor * 2), "copies values that it has computed"),
        ("out", lambda model, tensor: model.out.weight.data.copy_(tensor.view(8, 6).t()), 'converts "out"'),
        ("norm", lambda model, tensor: model.norm.data.copy_(tensor[1:2]), 'converts "norm"'),
        ("norm", lambda model, tensor: model.norm.data.mul_(2), "computes with the model's memory"),
        ("norm", lambda model, tensor: tensor.sum().item(), "needs the values"),
        ("norm", derive, "computes with the model's memory"),
        ("norm", replace, "replaces the memory"),
    ]:
        model = loaded(tensors)
        address = model.norm.data_ptr()
        model.load_weights = lambda weights, model=model, loading=loading: [loading(model, each) for _, each in weights]
        with pytest.raises(NotInPlaceError, match=message):
            find_parts(model, meta({name: tensors[name]}))
        assert model.norm.data_ptr() == address
        assert_equal_models(model, loaded(tensors))
    with pytest.raises(NotInPlaceError, match='converts "norm"'):
        find_parts(loaded(tensors), meta({"norm": torch.zeros(6).half()}))
    for change in (
        lambda model: setattr(model.out, "quant_method", Fp8LinearMethod()),
        lambda model: setattr(model.out, "process_weights_after_loading", print),
        lambda model: setattr(model.out, "cpu_linear", print),
    ):
        change(model := loaded(tensors))
        with pytest.raises(NotInPlaceError, match='layer "out"'):
            find_parts(model, meta(tensors))


def test_deltas_that_the_model_lacks_are_found(tmp_path, monkeypatch):
    """A server that missed deltas applies them with the newest one, in order."""
    save_weights(tmp_path / "base", 0)
    metadata = {
        f"{tmp_path}/weight_v{version:06d}": {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": "xor",
        }
        for version in (1, 2, 3)
    }
    monkeypatch.setattr(ops, "index_metadata", lambda path: metadata.get(path.rstrip("/"), {}))
    applied = []

    def prepare_parts(parts, paths, version):
        applied.append([path.rstrip("/").rpartition("/")[2] for path in paths])
        fst.set_version([part.tensor for part in parts], ops.index_metadata(paths[-1])["version"])

    monkeypatch.setattr(_live_model, "prepare_parts", prepare_parts)
    model = LiveModel()
    live = _live_model.LiveModel(model, str(tmp_path / "base"), ALONE)
    for source in (["weight_v000001/"], ["weight_v000003"], ["weight_v000001", "weight_v000002"]):
        live.prepare([f"{tmp_path}/{path}" for path in source])
    assert applied == [
        ["weight_v000001"],
        ["weight_v000002", "weight_v000003"],
        ["weight_v000001", "weight_v000002"],
    ]
    fst.set_version(model, "000007")
    with pytest.raises(ValueError, match=r"not lead back to version 000007 of the model, but end at .*weight_v000000"):
        live.prepare([f"{tmp_path}/weight_v000002"])


def update_shards(old, new, broken):
    """Updates the shards of a rank. The first update fails on one rank. Returns the kind of its error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = loaded(fst.load_file(f"{old}/model.safetensors"), rank, size)
    live = _live_model.LiveModel(model, old, Group.of(dist.group.WORLD, torch.device("cpu")))
    with pytest.raises((OSError, RankError)) as failure:
        live.prepare([broken if rank else new])
    assert_equal_models(model, loaded(fst.load_file(f"{old}/model.safetensors"), rank, size))
    live.prepare([new], "2").commit()
    assert_equal_models(model, loaded(fst.load_file(f"{new}/model.safetensors"), rank, size))
    return type(failure.value).__name__, fst.version_of([model.qkv.weight.data])


def test_ranks_update_all_or_none(ranks, tmp_path):
    for seed, name in enumerate(("old", "new")):
        save_weights(tmp_path / name, seed)
    results = ranks(2).run(update_shards, *(str(tmp_path / name) for name in ("old", "new", "missing")))
    assert results == [("RankError", "2"), ("FileNotFoundError", "2")]
