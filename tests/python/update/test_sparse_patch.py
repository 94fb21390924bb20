"""Sparse patches of trainers, against PyTorch's assignment by index."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fst
from fst._update.source import UpdateSource
from fst_bench.http_server import Server
from rawfile import assert_all_same

OLD = {"a": torch.arange(200_000).to(torch.bfloat16).view(500, 400), "b": torch.ones(7).bfloat16()}
FIRST = {"prev_model_version": "3", "changed_params": '["a", "b"]', "checksum_sha256": "0" * 64}
KEY = fst.EncryptionKey.from_bytes(bytes(range(32)))


def gaps_of(positions, dtype):
    steps = torch.diff(torch.tensor(positions, dtype=torch.long), prepend=torch.tensor([-1])) - 1
    return torch.from_numpy(steps.numpy().astype(dtype))


def write_patch(path, changes, positions=".indices", values=".values", save=save_file, stored=None, **metadata):
    """Writes positions and values of each tensor, as TRL does. `stored` replaces tensors, or removes them."""
    tensors = {}
    for name, (at, new) in changes.items():
        tensors[name + positions] = torch.tensor(at, dtype=torch.int32) if isinstance(at, list) else at
        tensors[name + values] = new
    tensors |= stored or {}
    stated = {"format": "sparse_weight_patch", "version": "1", "model_version": "4", **metadata}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save(kept, path, metadata={key: value for key, value in stated.items() if value is not None})
    return path


def copies(values=OLD):
    return {name: tensor.clone() for name, tensor in values.items()}


def assigned(changes):
    new = copies()
    for name, (at, values) in changes.items():
        new[name].view(-1)[torch.tensor(at, dtype=torch.long)] = values
    return new


def values(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


AT = [0, 1, 8191, 8192, 70_000, 199_999]
CHANGES = {"a": (AT, values(6)), "b": ([6], values(1, 1))}


def gap_delta(dtype):
    """Returns arguments of a patch whose gaps in "a" have a dtype."""
    stored = {"a.idx": gaps_of([2 * at for at in range(6)] if dtype == np.uint16 else AT, dtype)}
    return {"positions": ".idx", "values": ".val", "encoding": "gap_delta", "sparse": "True", "stored": stored}


def test_patches_match_assignment(tmp_path):
    path = tmp_path / "patch.safetensors"
    mixed = {"a": (AT[::-1], values(6)), "b": ([3, 0, 5], values(3, 1))}
    narrow = {"a": (list(range(0, 12, 2)), values(6))}
    later = {"positions": ".idx", "values": ".val", "sparse": "True", "num_changed_params": "9"}
    for changes, options in (
        (CHANGES, FIRST),
        (CHANGES, {**later, "encoding": "raw"}),
        (mixed, {}),
        (narrow, gap_delta(np.uint16)),
        ({"a": CHANGES["a"]}, gap_delta(np.uint32)),
        ({**CHANGES, "b": ([], values(0))}, {}),
    ):
        write_patch(path, changes, **options)
        target = copies()
        with fst.prepare_update(target, path) as update:
            assert_all_same(target, OLD)
            assert (update.is_delta, sorted(update.unverified)) == (True, sorted(changes))
            # Only the elements are staged.
            assert update.staged_bytes < 100
            update.commit()
        assert_all_same(target, assigned(changes))
        assert fst.version_of(target) == "4"


@given(
    st.integers(1, 9000).flatmap(
        lambda rows: st.tuples(st.just(rows), st.lists(st.integers(0, 3 * rows - 1), unique=True, max_size=40))
    ),
    st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float64]),
    st.booleans(),
)
def test_any_positions_match_assignment(tmp_path_factory, rows_and_positions, dtype, is_gap_delta):
    """Positions in any order, of the whole tensor and of a region of it."""
    rows, at = rows_and_positions
    at = sorted(at) if is_gap_delta else at
    old, new = torch.zeros(rows, 3, dtype=dtype), torch.arange(1, len(at) + 1).to(dtype)
    expected = old.clone()
    expected.view(-1)[torch.tensor(at, dtype=torch.long)] = new
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    options = {"encoding": "gap_delta", "stored": {"w.indices": gaps_of(at, np.uint16)}} if is_gap_delta else {}
    source = UpdateSource([str(write_patch(path, {"w": (at, new)}, **options))])
    half = [(rows // 2, rows - rows // 2, 1), (0, 2, 2)]
    for region in (None, half):
        part = old if region is None else old[rows // 2 :, ::2].contiguous()
        [(positions, changed)] = source.changes(["w"], [part], [old.shape], [region])
        if positions is None:
            part = changed
        else:
            part.view(-1)[positions.long()] = changed
        assert torch.equal(part, expected if region is None else expected[rows // 2 :, ::2])


def test_patch_that_does_not_fit_writes_nothing(tmp_path):
    two = values(2)
    for options, message in (
        ({"version": "2"}, '"version": "2"; known are 1'),
        ({"sparse": "no"}, '"sparse": "no"; known are True'),
        ({"encoding": "nvcomp_cascaded"}, '"encoding": "nvcomp_cascaded"; known are raw, gap_delta'),
        ({"model_version": None}, 'have no "model_version"'),
        ({"changed_params": '["a", "b", "c"]'}, 'only one of .*have "c"; it is incomplete'),
        ({"changed_params": '["a"]'}, 'only one of .*have "b"; it is incomplete'),
        ({"changed_params": "a, b"}, "no list of names"),
        ({"stored": {"a.values": None}}, 'tensor "a.indices".* no "a.values" beside it'),
        ({"stored": {"b.indices": None}}, 'tensor "b.values".* no "b.indices" beside it'),
        ({"stored": {"norm": two}}, 'tensor "norm".* neither positions nor values'),
        ({"stored": {"a.idx": torch.zeros(2, dtype=torch.int32), "a.val": two}}, 'changes "a" twice'),
        ({"stored": {"a.values": two}}, 'has 6 positions, but "a.values" has shape \\[2\\]'),
        ({"stored": {"a.indices": torch.tensor([AT])}}, "positions have one dimension"),
        ({"stored": {"a.indices": torch.tensor(AT)}}, 'dtype I64; positions in "raw" have I32'),
        ({"encoding": "gap_delta"}, 'dtype I32; positions in "gap_delta" have U16 or U32'),
        ({"stored": {"b.values": torch.ones(1)}}, '"b.values" of the patch has dtype F32, but .* BF16.*base='),
        ({"changes": {"b": ([0] * 8, values(8))}}, "8 elements change, but the target's tensor has 7"),
        ({"changes": {"b": ([0, 7], two)}}, "position number 1 is 7, but the tensor has 7 elements"),
        ({"changes": {"b": ([0, -1], two)}}, "position number 1 is -1"),
        ({"changes": {"b": ([5, 2, 5], values(3))}}, "position 5 occurs twice, as numbers 0 and 2"),
        ({"changes": {"c": ([0], values(1))}}, 'the target lacks "c"'),
        (
            {"changes": {"b": ([], two)}, "stored": {"b.indices": gaps_of([3, 7], np.uint16)}, "encoding": "gap_delta"},
            "gap number 1 leads to position 7, but the tensor has 7 elements",
        ),
    ):
        path = write_patch(tmp_path / "patch.safetensors", **{"changes": CHANGES, **options})
        target = copies()
        with pytest.raises((ValueError, fst.ModuleMismatchError), match=message) as error:
            fst.prepare_update(target, path)
        assert str(path) in str(error.value), options
        assert_all_same(target, OLD)


def test_versions_of_patches(tmp_path):
    path = write_patch(tmp_path / "patch.safetensors", CHANGES, **FIRST)
    for held in ("000003", "3", "first", None):
        target = copies()
        fst.set_version(target, held)
        fst.prepare_update(target, path).commit()
        assert fst.version_of(target) == "4"
    with pytest.raises(fst.VersionError, match='changes version "3", but the target has "4"; nothing was written'):
        fst.prepare_update(target, path)
    # Of the later format, which states no base version, any patch follows any delta.
    fst.save_delta(OLD, {**OLD, "b": OLD["b"] * 2}, tmp_path / "delta", version="7", base_version="6")
    write_patch(path, {"b": ([1], values(1))})
    target = copies()
    fst.set_version(target, "6")
    with fst.prepare_update(target, [tmp_path / "delta", path]) as update:
        assert update.unverified == ["b"]
        update.commit()
    assert target["b"].tolist() == [2.0, values(1).item(), 2.0, 2.0, 2.0, 2.0, 2.0]
    # The checksum of the delta is compared although a patch follows it.
    fst.set_version(target, "6")
    with pytest.raises(fst.IntegrityError, match='tensor "b"'):
        fst.prepare_update(target, [tmp_path / "delta", path])


def test_whole_tensors_and_several_files(tmp_path):
    whole = tmp_path / "anchor.safetensors"
    write_patch(whole, {}, stored={**OLD, "b": values(7)}, sparse="False", encoding="gap_delta")
    target = copies()
    with fst.prepare_update(target, whole) as update:
        assert not update.is_delta
        update.commit()
    assert torch.equal(target["b"], values(7))
    assert fst.version_of(target) == "4"
    path = write_patch(tmp_path / "patch.safetensors", CHANGES)
    (tmp_path / "shards").mkdir()
    save_file(OLD, tmp_path / "shards" / "model-00001-of-00002.safetensors")
    write_patch(tmp_path / "shards" / "model-00002-of-00002.safetensors", CHANGES)
    for paths, message in (
        ([whole, path], "is no delta, but other paths are"),
        ([path, whole], "is no delta, but other paths are"),
        (tmp_path / "shards", "give each patch as a file of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            fst.prepare_update(target, paths)


def test_patches_come_as_any_file_does(tmp_path, command):
    """From a server, encrypted, on the command line, and through the operator."""
    plain, secret = tmp_path / "plain.safetensors", tmp_path / "secret.safetensors"
    write_patch(plain, CHANGES)
    write_patch(secret, CHANGES, save=lambda *args, **options: fst.save_file(*args, encryption_key=KEY, **options))
    with Server({"patch.safetensors": plain.read_bytes()}) as server:
        for path, key in ((server.url("patch.safetensors"), None), (secret, KEY)):
            target = copies()
            fst.prepare_update(target, path, encryption_key=key).commit()
            assert_all_same(target, assigned(CHANGES))
    target = copies()
    torch.ops.fst.prepare_update([str(plain)], list(target), list(target.values())).commit()
    assert_all_same(target, assigned(CHANGES))
    fst.save_file(OLD, tmp_path / "old.safetensors")
    shown = command("delta", "show", "plain.safetensors")
    assert shown.stdout.splitlines()[1].split() == ["plain.safetensors", "-", "4", "raw", "-", "2", "42", "B"]
    [delta] = json.loads(command("delta", "show", "plain.safetensors", "--json").stdout)["deltas"]
    assert (delta["base_version"], delta["checksum"]) == (None, None)
    assert command("delta", "apply", "old.safetensors", "plain.safetensors", "full").returncode == 0
    assert_all_same(fst.load_file(tmp_path / "full"), assigned(CHANGES))


def test_positions_in_memory():
    """Tensors that vLLM receives: positions of 32 bits, which are staged without a file."""
    target = copies()
    update = torch.classes.fst.Update(list(target), list(target.values()))
    at = [torch.tensor(at, dtype=torch.int32).view(torch.uint32) for at, _ in CHANGES.values()]
    update.stage(list(target.values()), at, [values for _, values in CHANGES.values()], "4")
    update.commit()
    assert_all_same(target, assigned(CHANGES))
    assert fst.version_of(target) == "4"
