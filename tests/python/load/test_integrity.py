"""Digests: saves write them, and loads compare them before a tensor is returned."""

import hashlib
import json
import subprocess
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_with_safetensors
from torch import Tensor

import fst
from combinations import pairwise
from suite import READERS

TENSORS = {
    "large": torch.arange(300_000, dtype=torch.float32).reshape(1000, 300),
    "half": torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100),
    "bytes": torch.arange(201, dtype=torch.uint8),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture(params=["default", *READERS])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "default":
        monkeypatch.setenv("FST_READER", request.param)
    return request.param


def damage(path: Path, name: str = "large") -> None:
    """Changes the last byte of a tensor."""
    content = bytearray(path.read_bytes())
    offsets = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[name]["data_offsets"]
    content[8 + int.from_bytes(content[:8], "little") + offsets[1] - 1] ^= 1
    path.write_bytes(content)


def assert_loaded(tensors: dict[str, Tensor]) -> None:
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, TENSORS[name], rtol=0, atol=0)


def sha256_of(path: Path) -> dict[str, str]:
    return {path.name: "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()}


def module() -> torch.nn.Module:
    linear = torch.nn.Linear(300, 1000, bias=False)
    linear.weight.data.zero_()
    return linear


def stream(path: Path, verify: object) -> dict[str, Tensor]:
    return dict(fst.stream(path, verify=verify, dtype=torch.float64))


def safe_open(path: Path, verify: object) -> dict[str, Tensor]:
    with fst.safe_open(path, verify=verify) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


LOADS: dict[str, Callable[[Path, object], object]] = {
    "load_file": lambda path, verify: fst.load_file(path, verify=verify),
    "cast": lambda path, verify: fst.load_file(path, dtype=torch.float64, verify=verify),
    "load_files": lambda path, verify: fst.load_files([path], verify=verify),
    "load_tensors": lambda path, verify: fst.load_tensors(path, list(TENSORS), verify=verify),
    "progress": lambda path, verify: fst.load_file(path, progress=True, verify=verify),
    "stream": stream,
    "safe_open": safe_open,
    "load_into": lambda path, verify: fst.load_into(
        path, list(TENSORS), [torch.empty_like(tensor) for tensor in TENSORS.values()], verify=verify
    ),
    "verify": lambda path, verify: fst.verify(path, None if verify is True else verify),
}


@pytest.mark.parametrize(
    ("load", "reader", "digests"), pairwise(LOADS, READERS, ["blake3", "sha256"]), indirect=["reader"]
)
def test_every_load_compares_the_digests_of_the_file(path, reader, load, digests):
    fst.save_file(TENSORS, path, digests=digests)
    LOADS[load](path, True)
    damage(path)
    with pytest.raises(fst.IntegrityError, match=f'model.safetensors.*"large".*{digests}:[0-9a-f]{{64}}'):
        LOADS[load](path, True)


@pytest.mark.parametrize(("load", "reader"), list(zip(LOADS, cycle(["default", *READERS]))), indirect=["reader"])
def test_every_load_compares_a_manifest(path, reader, load):
    fst.save_file(TENSORS, path)
    manifest = sha256_of(path)
    if load in ("stream", "progress"):
        with pytest.raises(ValueError, match="cannot verify them with a manifest"):
            LOADS[load](path, manifest)
        return
    LOADS[load](path, manifest)
    damage(path, "bytes")
    with pytest.raises(fst.IntegrityError, match=r"model.safetensors.*the manifest states sha256:"):
        LOADS[load](path, manifest)


def test_verified_tensors_are_those_of_the_file(path, reader):
    fst.save_file(TENSORS, path, {"format": "pt"}, digests="blake3")
    for verify in (True, sha256_of(path)):
        with fst.profile() as profile:
            assert_loaded(fst.load_file(path, verify=verify))
        assert profile.summary().stages["hash"].bytes >= sum(tensor.nbytes for tensor in TENSORS.values())
    assert_loaded(load_with_safetensors(path))
    assert fst.metadata(path)["format"] == "pt"


def test_load_into_has_written_nothing(path, reader):
    fst.save_file(TENSORS, path, digests="blake3")
    damage(path, "bytes")
    out = [torch.zeros_like(TENSORS[name]) for name in ("large", "bytes")]
    with pytest.raises(fst.IntegrityError):
        fst.load_into(path, ["large", "bytes"], out, verify=True)
    assert not any(tensor.any() for tensor in out)


@pytest.mark.parametrize("verify", ["digests", "manifest"])
def test_load_module_has_written_nothing(path, verify):
    fst.save_file({"weight": TENSORS["large"]}, path, digests="blake3")
    request = True if verify == "digests" else sha256_of(path)
    linear = module()
    fst.load_module(linear, path, verify=request)
    assert linear.weight.equal(TENSORS["large"])
    damage(path, "weight")
    linear = module()
    with pytest.raises(fst.IntegrityError):
        fst.load_module(linear, path, verify=request)
    assert not linear.weight.any()


def prefetched(path: Path, verify: object) -> Tensor:
    with fst.safe_open(path, verify=verify) as file:
        return dict(file.prefetch({"large": slice(1, 6)}))["large"]


# Loads of a part of a tensor, which SHA-256 digests and manifests do not cover.
PARTS: dict[str, Callable[[Path, object], object]] = {
    "load_slices": lambda path, verify: fst.load_slices(path, ["large"], [0], [1], [5], verify=verify),
    "load_boxes": lambda path, verify: fst.load_boxes(path, ["large"], [[(1, 5, 1), (0, 300, 1)]], verify=verify),
    "progress": lambda path, verify: fst.load_slices(path, ["large"], [0], [1], [5], verify=verify, progress=True),
    "get_slice": lambda path, verify: fst.safe_open(path, verify=verify).get_slice("large")[1:6],
    "prefetch": prefetched,
}
# Loads of some tensors of a file, which manifests do not cover.
SOME: dict[str, Callable[[Path, object], object]] = {
    "load_slices": PARTS["load_slices"],
    "load_boxes": PARTS["load_boxes"],
    "load_tensors": lambda path, verify: fst.load_tensors(path, ["large"], verify=verify),
    "cast": lambda path, verify: fst.load_tensors(path, ["large"], dtype=torch.float64, verify=verify),
    "empty": lambda path, verify: fst.load_tensors(path, ["empty", "large"], verify=verify),
    "load_into": lambda path, verify: fst.load_into(path, ["large"], [torch.empty(1000, 300)], verify=verify),
}


@pytest.mark.parametrize(
    ("load", "is_manifest"), [(load, False) for load in PARTS.values()] + [(load, True) for load in SOME.values()]
)
def test_parts_without_digests_are_refused_unless_allowed(path, load, is_manifest):
    fst.save_file(TENSORS, path, digests="sha256")
    verify = sha256_of(path) if is_manifest else True
    damage(path)
    for refused in (verify, fst.Verify(verify)):
        pattern = r'model.safetensors.*"large".*cannot be verified.*fst.verify.*partial="allow"'
        with pytest.raises(fst.IntegrityError, match=pattern):
            load(path, refused)
    allowed = fst.Verify(verify, partial="allow")
    with pytest.warns(fst.IntegrityWarning, match='do not cover what was loaded of .*"large"') as warned:
        load(path, allowed)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fst.IntegrityWarning)
        with pytest.raises(fst.IntegrityWarning):
            load(path, allowed)


def test_loads_that_digests_cover_are_compared_if_parts_are_allowed(path):
    fst.save_file(TENSORS, path, digests="sha256")
    allowed = fst.Verify(True, partial="allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A slice of all indices is the tensor. One of no index has no bytes.
        fst.load_slices(path, ["large", "large"], [0, 0], [0, 5], [1000, 0], verify=allowed)
        fst.load_tensors(path, ["half", "half"], verify=allowed)
        fst.load_file(path, "meta", verify=True)
        fst.load_tensors(path, ["half"], "meta", verify=sha256_of(path))
    manifest = sha256_of(path)
    damage(path)
    for load in (LOADS["load_file"], LOADS["load_into"], LOADS["stream"]):
        with pytest.raises(fst.IntegrityError):
            load(path, allowed)
    with pytest.raises(fst.IntegrityError):
        fst.load_file(path, verify=fst.Verify(manifest, partial="allow"))
    with pytest.raises(ValueError, match="cannot verify them with a manifest"):
        fst.stream(path, verify=fst.Verify(manifest, partial="allow"))
    with pytest.raises(ValueError, match="partial must be"):
        fst.Verify(True, partial="ignore")


def test_operators_take_the_permission(path):
    fst.save_file(TENSORS, path)
    request = {"verify": {"source": json.dumps(sha256_of(path)), "partial": "allow"}}
    arguments = [str(path)], ["half"]
    # Operators raise the exceptions of C++.
    with pytest.raises(ValueError, match=r"^\[integrity\].*cannot be verified"):
        torch.ops.fst.load_tensors(*arguments, verify=request["verify"]["source"])
    assert torch.ops.fst.load_tensors(*arguments, verify=json.dumps(request))[0].equal(TENSORS["half"])
    request["verify"]["partial"] = "ignore"
    with pytest.raises(ValueError, match="the request to verify is not valid"):
        torch.ops.fst.load_tensors(*arguments, verify=json.dumps(request))


def test_safe_open_verifies_files_with_a_manifest(path):
    fst.save_file(TENSORS, path)
    with fst.safe_open(path, verify=sha256_of(path)) as file:
        # The whole file was verified, so that slices are covered.
        assert file.get_slice("large")[:2].shape == (2, 300)
    manifest = sha256_of(path)
    damage(path, "bytes")
    with pytest.raises(fst.IntegrityError):
        fst.safe_open(path, verify=manifest)


def test_manifests_of_other_programs(path, tmp_path):
    fst.save_file(TENSORS, path)
    lines = subprocess.run(["sha256sum", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    tagged = subprocess.run(["sha256sum", "--tag", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    blake2b = subprocess.run(["b2sum", "--tag", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    for content in (lines, tagged, blake2b, json.dumps(sha256_of(path)).encode()):
        manifest = tmp_path / "digests"
        manifest.write_bytes(content)
        assert_loaded(fst.load_file(path, verify=manifest))
        assert_loaded(fst.load_file(path, verify=manifest.as_uri()))
    assert_loaded(torch.ops.fst.load_file(str(path), verify=str(manifest)))


def test_errors_say_what_to_do(path):
    fst.save_file(TENSORS, path)
    with pytest.raises(fst.IntegrityError, match="carries no digests; save it with digests="):
        fst.load_file(path, verify=True)
    with pytest.raises(fst.IntegrityError, match="manifest has no digest of the file"):
        fst.load_file(path, verify={"other": "sha256:" + "0" * 64})
    with pytest.raises(fst.SafetensorError, match='not "sha256:" or'):
        fst.load_file(path, verify={"model.safetensors": "md5:00"})
    with pytest.raises(TypeError, match="verify must be"):
        fst.load_file(path, verify=1)
    with pytest.raises(FileNotFoundError):
        fst.load_file(path, verify="absent")
    with pytest.raises(ValueError, match="digests must be"):
        fst.save_file(TENSORS, path, digests="md5")


def test_every_save_writes_digests(path, tmp_path):
    fst.save_file_async(TENSORS, path, digests="sha256").result()
    assert_loaded(fst.load_file(path, verify=True))
    sharded = tmp_path / "sharded" / "model.safetensors"
    sharded.parent.mkdir()
    fst.save_file(TENSORS, sharded, max_shard_bytes=3000, digests="blake3")
    assert len(list(sharded.parent.glob("*.safetensors"))) > 1
    assert fst.safe_open(sharded.parent).metadata() == {}
    assert_loaded(fst.load_file(sharded.parent, verify=True))
    written = tmp_path / "written.safetensors"
    with fst.Writer(written, digests="blake3") as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    assert_loaded(fst.load_file(written, verify=True))
    # A copy of the metadata renews the digests.
    tensors = {"other": torch.ones(3)}
    serialized = torch.ops.fst.serialize(list(tensors.values()), list(tensors), metadata=fst.metadata(path))
    path.write_bytes(serialized.numpy().tobytes())
    assert fst.load_file(path, verify=True)["other"].equal(torch.ones(3))
    fst.save_file(tensors, path, fst.metadata(written))
    fst.verify(path)


def test_many_tensors(path):
    tensors = {f"model.layers.{index}.weight": torch.full((5,), index) for index in range(5000)}
    fst.save_file(tensors, path, digests="blake3")
    loaded = fst.load_file(path, verify=True)
    assert loaded.keys() == tensors.keys()
    # 43 characters for each digest.
    assert len(fst.metadata(path)["fst.digests"]) < 5000 * 43 + 100


def load_sharded(path: str, verify: object) -> Tensor:
    from torch.distributed.tensor import Shard

    return fst.load_sharded(path, {"large": Shard(0), "*": None}, strategy="exchange", verify=verify)["large"]


def refuse_sharded(path: str, verify: object) -> str:
    try:
        load_sharded(path, verify)
    except (fst.IntegrityError, fst.RankError) as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("is_manifest", [False, True])
def test_ranks_share_the_verdict(path, ranks, is_manifest):
    fst.save_file(TENSORS, path, digests="blake3")
    verify = sha256_of(path) if is_manifest else True
    group = ranks(2)
    parts = group.run(load_sharded, str(path), verify)
    assert torch.cat(parts).equal(TENSORS["large"])
    damage(path)
    names = group.run(refuse_sharded, str(path), verify)
    assert sorted(names) == ["IntegrityError", "RankError"]
