"""New deltas: what they hold, and that they lead from one version to the other."""

import json

import pytest
import torch

import fst
from combinations import pairwise
from deltafile import INDEX
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._update.delta_files import apply_delta
from rawfile import DTYPES, assert_all_same

VERSIONS = {"version": "000001", "base_version": "000000"}


def models():
    """Returns two versions of a model with all dtypes, of which elements of some tensors differ."""
    generator = torch.Generator().manual_seed(0)
    old, new = {}, {}
    for number, (name, (dtype, _)) in enumerate(DTYPES.items()):
        data = torch.randint(0, 2, (16 * (number + 1),), generator=generator, dtype=torch.uint8)
        old[name] = data.view(dtype).view(2, -1)
        data = data.clone()
        data[::7] ^= 1
        new[name] = data.view(dtype).view(2, -1)
    large = torch.randn(300_000, generator=generator)
    old |= {"same": torch.ones(5), "empty": torch.ones(0), "scalar": torch.tensor(1.0), "large": large}
    new |= {"same": torch.ones(5), "empty": torch.ones(0), "scalar": torch.tensor(2.0), "large": large + (large > 2)}
    return old, new


@pytest.mark.parametrize(
    ("encoding", "checksum", "source", "limit"),
    pairwise(["xor", "overwrite"], ["xxh3-128", "blake3", "adler32"], ["files", "tensors"], [500, 10**6]),
)
def test_delta_leads_to_the_new_version(tmp_path, encoding, checksum, source, limit):
    old, new = models()
    fst.save_file(old, tmp_path / "old.safetensors")
    fst.save_file(new, tmp_path / "new.safetensors")
    given = (old, new) if source == "tensors" else (tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    delta = tmp_path / "deltas" / "weight_v000001"
    fst.save_delta(*given, delta, **VERSIONS, encoding=encoding, checksum=checksum, max_shard_bytes=limit)
    assert set(fst.tensor_names(delta)) == new.keys() - {"same", "empty"}
    index = json.loads((delta / INDEX).read_text())
    size = index["metadata"].pop("total_size")
    assert index["metadata"].pop("fst.save")
    assert index["metadata"] == {
        **VERSIONS,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    assert size < sum(tensor.nbytes for tensor in new.values()) / 4
    assert (len(set(index["weight_map"].values())) > 1) == (limit == 500)
    apply_delta(tmp_path / "old.safetensors", delta, tmp_path / "applied")
    assert_all_same(fst.load_file(tmp_path / "applied"), new)


def test_files_are_read_in_parts(tmp_path, monkeypatch):
    """Local files are not loaded into new memory. Those of which loads make no views are."""
    old, new = models()
    paths = [tmp_path / "old.safetensors", tmp_path / "new.safetensors"]
    for path, tensors in zip(paths, (old, new), strict=True):
        fst.save_file(tensors, path)
    loaded = []
    load = OpenCheckpoint.load_copies
    monkeypatch.setattr(OpenCheckpoint, "load_copies", lambda *given: loaded.append(given) or load(*given))
    fst.save_delta(*paths, tmp_path / "parts", **VERSIONS)
    assert not loaded
    monkeypatch.setenv("FST_READER", "pread")
    fst.save_delta(*paths, tmp_path / "copies", **VERSIONS)
    assert loaded
    assert_all_same(fst.load_file(tmp_path / "parts"), fst.load_file(tmp_path / "copies"))


def test_tensors_with_strides(tmp_path):
    old = {"w": torch.zeros(20, 30)}
    new = {"w": torch.arange(600.0).view(30, 20).t()}
    fst.save_delta({"w": torch.zeros(30, 20).t()}, new, tmp_path / "delta", **VERSIONS)
    fst.save_file(old, tmp_path / "old.safetensors")
    apply_delta(tmp_path / "old.safetensors", tmp_path / "delta", tmp_path / "applied")
    assert_all_same(fst.load_file(tmp_path / "applied"), new)


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path):
    old, new = models()
    fst.save_file(old, tmp_path / "old.safetensors")
    live = {name: tensor.cuda() for name, tensor in new.items()}
    fst.save_delta(tmp_path / "old.safetensors", live, tmp_path / "delta", **VERSIONS)
    apply_delta(tmp_path / "old.safetensors", tmp_path / "delta", tmp_path / "applied")
    assert_all_same(fst.load_file(tmp_path / "applied"), new)


def test_equal_versions_make_an_empty_delta(tmp_path):
    tensors = {"w": torch.ones(3)}
    fst.save_delta(tensors, tensors, tmp_path / "delta", **VERSIONS)
    assert fst.tensor_names(tmp_path / "delta") == []
    fst.save_file(tensors, tmp_path / "old.safetensors")
    apply_delta(tmp_path / "old.safetensors", tmp_path / "delta", tmp_path / "applied")
    assert_all_same(fst.load_file(tmp_path / "applied"), tensors)


def test_overwrite_applies_twice(tmp_path):
    """A delta of positions and values leads to the new version from that version, too."""
    old, new = {"w": torch.zeros(100)}, {"w": torch.zeros(100).index_fill(0, torch.tensor([3, 50]), 1.0)}
    fst.save_file(new, tmp_path / "new.safetensors")
    for encoding in ("overwrite", "xor"):
        fst.save_delta(old, new, tmp_path / encoding, **VERSIONS, encoding=encoding)
    apply_delta(tmp_path / "new.safetensors", tmp_path / "overwrite", tmp_path / "applied")
    assert_all_same(fst.load_file(tmp_path / "applied"), new)
    with pytest.raises(ValueError, match=r'tensor "w": byte \d+: the new bytes have xxh3-128'):
        apply_delta(tmp_path / "new.safetensors", tmp_path / "xor", tmp_path / "other")
    assert not (tmp_path / "other" / INDEX).exists()


OLD, NEW = {"v": torch.zeros(1), "w": torch.zeros(3)}, {"v": torch.ones(1), "w": torch.ones(3)}


def test_versions_that_a_delta_cannot_express(tmp_path):
    for new, error, message in [
        ({"w": torch.ones(3)}, ValueError, 'the new version lacks 1 tensor: "v"; a delta neither adds nor removes'),
        ({"v": torch.ones(1), "w": torch.ones(3), "x": torch.ones(1)}, ValueError, 'the old version lacks .*"x"'),
        ({"v": torch.ones(1), "w": torch.ones(3, 1)}, ValueError, r'tensor "w": is torch.float32 \[3\] in the old'),
        ({"v": torch.ones(1), "w": torch.ones(3).half()}, ValueError, "torch.float16 .* in the new one"),
        ({"v": torch.ones(1), "w": [1.0]}, TypeError, 'tensor "w": expected a torch.Tensor, not list'),
    ]:
        with pytest.raises(error, match=message):
            fst.save_delta(OLD, new, tmp_path / "delta", **VERSIONS)
    assert not (tmp_path / "delta").exists()


def test_invalid_arguments(tmp_path):
    for options, error, message in [
        ({"version": "000000"}, ValueError, "are both '000000'"),
        ({"version": 1}, TypeError, "version must be a str, not int"),
        ({"base_version": ""}, ValueError, "base_version is empty"),
        ({"encoding": "sparse"}, ValueError, '"sparse" is unknown; choose one of xor, overwrite'),
        ({"checksum": "crc32"}, ValueError, '"crc32" is unknown; choose one of xxh3-128, blake3, adler32'),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes is 0, but must be at least 1"),
    ]:
        with pytest.raises(error, match=message):
            fst.save_delta(OLD, NEW, tmp_path / "delta", **{**VERSIONS, **options})
    assert not (tmp_path / "delta").exists()
