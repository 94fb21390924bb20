"""Updates of a server's model in place: the places of tensors, chains of deltas, and ranks."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fst
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.group import Group, RankError
from fst.plugins._layout import NotInPlaceError, find_parts
from fst.plugins._live_model import LiveModel as LiveModelUpdates
from live import Fp8LinearMethod, assert_equal_models, loaded, save_weights

ALONE = Group.alone(torch.device("cpu"))


def opened(path, tensors):
    save_file(tensors, path)
    return OpenCheckpoint([path])


def test_parts_are_regions_that_the_model_copies(tmp_path):
    tensors = save_weights(tmp_path / "m", 0)
    model = loaded(tensors, rank=1, size=2)
    before = [parameter.clone() for parameter in model.parameters()]
    parts = {part.name: part for part in find_parts(model, opened(tmp_path / "all.safetensors", tensors))}
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
        (
            "norm",
            lambda model, tensor: model.norm.data.copy_(tensor * 2),
            "needs the values of tensors: aten.mul.Tensor",
        ),
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
            find_parts(model, opened(tmp_path / "one.safetensors", {name: tensors[name]}))
        assert model.norm.data_ptr() == address
        assert_equal_models(model, loaded(tensors))
    with pytest.raises(NotInPlaceError, match='converts "norm"'):
        find_parts(loaded(tensors), opened(tmp_path / "half.safetensors", {"norm": torch.zeros(6).half()}))
    for change in (
        lambda model: setattr(model.out, "quant_method", Fp8LinearMethod()),
        lambda model: setattr(model.out, "process_weights_after_loading", print),
        lambda model: setattr(model.out, "cpu_linear", print),
    ):
        change(model := loaded(tensors))
        with pytest.raises(NotInPlaceError, match='layer "out"'):
            find_parts(model, opened(tmp_path / "all.safetensors", tensors))


def save_versions(directory, count):
    """Saves a checkpoint, and deltas from each version to the next. Returns the weights of all versions."""
    versions = [save_weights(directory / "base", 0)]
    for number in range(1, count + 1):
        new = {name: tensor.clone() for name, tensor in versions[-1].items()}
        for name in ("embed", "k", "out"):
            new[name][number - 1, ::2] += 1
        delta = directory / f"weight_v{number:06d}"
        fst.save_delta(versions[-1], new, delta, version=f"{number:06d}", base_version=f"{number - 1:06d}")
        versions.append(new)
    return versions


def test_deltas_that_the_model_lacks_are_found(tmp_path):
    """A server that missed deltas applies them with the newest one, in order."""
    versions = save_versions(tmp_path, 4)
    model = loaded(versions[0])
    live = LiveModelUpdates(model, str(tmp_path / "base"), ALONE)
    for source, version in ((["weight_v000001/"], 1), (["weight_v000003"], 3), (["weight_v000004"], 4)):
        update = live.prepare([f"{tmp_path}/{path}" for path in source])
        assert (update.version, update.unverified) == (f"00000{version}", [])
        update.commit()
        assert_equal_models(model, loaded(versions[version]))
    with pytest.raises(ValueError, match=r"not lead back to version 000004 of the model, but end at .*weight_v000000"):
        live.prepare([f"{tmp_path}/weight_v000002"])
    live.prepare([f"{tmp_path}/base"], "000000").commit()
    live.prepare([f"{tmp_path}/weight_v00000{number}" for number in (1, 2)]).commit()
    assert_equal_models(model, loaded(versions[2]))


def update_shards(directory):
    """Updates the shards of a rank, to a checkpoint and by deltas. The first update fails on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    versions = [fst.load_file(f"{directory}/base/model.safetensors")]
    model = loaded(versions[0], rank, size)
    live = LiveModelUpdates(model, f"{directory}/base", Group.of(dist.group.WORLD, torch.device("cpu")))
    with pytest.raises((OSError, RankError)) as failure:
        live.prepare([f"{directory}/missing" if rank else f"{directory}/new"])
    assert_equal_models(model, loaded(versions[0], rank, size))
    update = live.prepare([f"{directory}/weight_v000002"])
    update.commit()
    # Checksums are of whole tensors.
    assert sorted(update.unverified) == ["embed", "k", "out"]
    assert_equal_models(model, loaded(fst.load_file(f"{directory}/second.safetensors"), rank, size))
    live.prepare([f"{directory}/new"], "9").commit()
    assert_equal_models(model, loaded(fst.load_file(f"{directory}/new/model.safetensors"), rank, size))
    return type(failure.value).__name__, fst.version_of([model.qkv.weight.data])


def test_ranks_update_all_or_none(ranks, tmp_path):
    fst.save_file(save_versions(tmp_path, 2)[2], tmp_path / "second.safetensors")
    save_weights(tmp_path / "new", 1)
    assert ranks(2).run(update_shards, str(tmp_path)) == [("RankError", "9"), ("FileNotFoundError", "9")]
