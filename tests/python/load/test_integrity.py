"""Digests: saves write them, and loads compare them before a tensor is returned."""

import json
import subprocess
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_with_safetensors
from torch import Tensor

import fst
from rawfile import assert_all_same
from saved import damage, manifest_of
from suite import READERS

EVERY_READER = ["default", *READERS]
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


def assert_loaded(tensors: dict[str, Tensor]) -> None:
    assert_all_same(tensors, TENSORS)


def safe_open(path: Path, verify: object) -> dict[str, Tensor]:
    with fst.safe_open(path, verify=verify) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


LOADS: dict[str, Callable[[Path, object], object]] = {
    "load_file": lambda path, verify: fst.load_file(path, verify=verify),
    "cast": lambda path, verify: fst.load_file(path, dtype=torch.float64, verify=verify),
    "load_files": lambda path, verify: fst.load_files([path], verify=verify),
    "load_tensors": lambda path, verify: fst.load_tensors(path, list(TENSORS), verify=verify),
    "progress": lambda path, verify: fst.load_file(path, progress=True, verify=verify),
    "stream": lambda path, verify: dict(fst.stream(path, verify=verify, dtype=torch.float64)),
    "safe_open": safe_open,
    "load_into": lambda path, verify: fst.load_into(
        path, list(TENSORS), [torch.empty_like(tensor) for tensor in TENSORS.values()], verify=verify
    ),
    "verify": lambda path, verify: fst.verify(path, None if verify is True else verify),
}


# tests/rust/digests.rs has all readers and algorithms.
@pytest.mark.parametrize(
    ("load", "named_reader", "digests"),
    list(zip(LOADS, cycle(EVERY_READER), cycle(["blake3", "sha256"]))),
    indirect=["named_reader"],
)
@pytest.mark.usefixtures("named_reader")
def test_every_load_compares_the_digests_and_a_manifest(path, load, digests):
    fst.save_file(TENSORS, path, digests=digests)
    manifest = manifest_of(path)
    LOADS[load](path, True)
    if load in ("stream", "progress"):
        with pytest.raises(ValueError, match="cannot verify them with a manifest"):
            LOADS[load](path, manifest)
    else:
        LOADS[load](path, manifest)
    damage(path, "large")
    with pytest.raises(fst.IntegrityError, match=f'model.safetensors.*"large".*{digests}:[0-9a-f]{{64}}'):
        LOADS[load](path, True)
    if load not in ("stream", "progress"):
        with pytest.raises(fst.IntegrityError, match=r"model.safetensors.*the manifest states sha256:"):
            LOADS[load](path, manifest)


def test_verified_tensors_are_those_of_the_file(path):
    fst.save_file(TENSORS, path, {"format": "pt"}, digests="blake3")
    for verify in (True, manifest_of(path)):
        with fst.profile() as profile:
            assert_loaded(fst.load_file(path, verify=verify))
        assert profile.summary().stages["hash"].bytes >= sum(tensor.nbytes for tensor in TENSORS.values())
    assert_loaded(load_with_safetensors(path))
    assert fst.metadata(path)["format"] == "pt"


@pytest.mark.parametrize("named_reader", EVERY_READER, indirect=True)
@pytest.mark.usefixtures("named_reader")
def test_loads_into_tensors_have_written_nothing(path):
    fst.save_file(TENSORS, path, digests="blake3")
    module = torch.nn.Module()
    out = [torch.zeros_like(TENSORS[name]) for name in ("large", "bytes")]
    for name, tensor in zip(("large", "bytes"), out, strict=True):
        module.register_buffer(name, tensor)
    manifest = manifest_of(path)
    damage(path, "bytes")
    for verify in (True, manifest):
        for load in (
            lambda verify: fst.load_into(path, ["large", "bytes"], out, verify=verify),
            lambda verify: fst.load_module(module, path, strict=False, verify=verify),
        ):
            with pytest.raises(fst.IntegrityError):
                load(verify)
            assert not any(tensor.any() for tensor in out)
    damage(path, "bytes")
    fst.load_module(module, path, strict=False, verify=True)
    assert module.large.equal(TENSORS["large"])


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


def load_some(path: Path, verify: object) -> list[Tensor]:
    """Loads some tensors of a file, which manifests do not cover."""
    return fst.load_tensors(path, ["empty", "large"], verify=verify)


@pytest.mark.parametrize(("load", "is_manifest"), [*((load, False) for load in PARTS.values()), (load_some, True)])
def test_parts_without_digests_are_refused_unless_allowed(path, load, is_manifest):
    fst.save_file(TENSORS, path, digests="sha256")
    verify = manifest_of(path) if is_manifest else True
    damage(path, "large")
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
        fst.load_tensors(path, ["half"], "meta", verify=manifest_of(path))
        with fst.safe_open(path, verify=manifest_of(path)) as file:
            # The whole file was verified, so that slices are covered.
            assert file.get_slice("large")[:2].shape == (2, 300)
    manifest = manifest_of(path)
    damage(path, "large")
    for load in (LOADS["load_file"], LOADS["load_into"], LOADS["stream"]):
        with pytest.raises(fst.IntegrityError):
            load(path, allowed)
    with pytest.raises(fst.IntegrityError):
        fst.load_file(path, verify=fst.Verify(manifest, partial="allow"))
    with pytest.raises(ValueError, match="cannot verify them with a manifest"):
        fst.stream(path, verify=fst.Verify(manifest, partial="allow"))
    with pytest.raises(ValueError, match="partial must be"):
        fst.Verify(True, partial="ignore")


def test_operators_take_the_permission(path, capfd):
    fst.save_file(TENSORS, path)
    request = {"verify": {"source": json.dumps(manifest_of(path)), "partial": "allow"}}
    arguments = [str(path)], ["half"]
    # Operators raise the exceptions of C++.
    with pytest.raises(ValueError, match=r"^\[integrity\].*cannot be verified"):
        torch.ops.fst.load_tensors(*arguments, verify=request["verify"]["source"])
    assert torch.ops.fst.load_tensors(*arguments, verify=json.dumps(request))[0].equal(TENSORS["half"])
    assert 'do not cover what was loaded of "half", so it was not verified' in capfd.readouterr().err
    request["verify"]["partial"] = "ignore"
    with pytest.raises(ValueError, match="the request to verify is not valid"):
        torch.ops.fst.load_tensors(*arguments, verify=json.dumps(request))


def test_manifests_of_other_programs(path, tmp_path):
    fst.save_file(TENSORS, path)
    lines = subprocess.run(["sha256sum", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    tagged = subprocess.run(["sha256sum", "--tag", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    blake2b = subprocess.run(["b2sum", "--tag", path.name], cwd=tmp_path, capture_output=True, check=True).stdout
    for content in (lines, tagged, blake2b, json.dumps(manifest_of(path)).encode()):
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
