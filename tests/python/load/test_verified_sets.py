"""Checkpoints of several files: none may be left out, exchanged or added where the files are verified or encrypted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open as safetensors_open
from safetensors.torch import save_file as save_with_safetensors

import fst
from saved import KEY, manifest_of, registered

TENSORS = {name: torch.full((100,), float(value)) for value, name in enumerate("abc", 1)}
INDEX = "model.safetensors.index.json"
FILES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


def save(path: Path, factor: int = 1, key: fst.EncryptionKey | None = KEY) -> None:
    tensors = {name: tensor * factor for name, tensor in TENSORS.items()}
    fst.save_file(tensors, path / "model.safetensors", max_shard_bytes=400, encryption_key=key)
    assert sorted(file.name for file in path.iterdir()) == [*FILES, INDEX]


def edit_index(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def manifest_in(path: Path, pattern: str = "*") -> dict[str, str]:
    return manifest_of(*(file for file in path.glob(pattern) if file.is_file()))


LOADS: dict[str, Callable[..., object]] = {
    "load_file": fst.load_file,
    "load_tensors": lambda path, **options: fst.load_tensors(path, ["a"], **options),
    "safe_open": fst.safe_open,
    "verify": lambda path, verify, **options: fst.verify(path, verify, **options),
}

# Edits of the index of three files, which leave files that load.
EDITS: dict[str, Callable[[dict[str, str]], object]] = {
    "left out": lambda files: files.pop("c"),
    "exchanged": lambda files: files.update(dict.fromkeys(files, "sub/other.safetensors")),
    "added": lambda files: files.update({"other": "sub/other.safetensors"}),
    "emptied": dict.clear,
}


@pytest.mark.parametrize("by", ["manifest", "signature"])
def test_an_index_with_a_digest_is_compared(path, sign, by):
    save(path, key=None)
    (path / "sub").mkdir()
    save_with_safetensors({name: tensor + 10 for name, tensor in TENSORS.items()}, path / "sub" / "other.safetensors")
    request = manifest_in(path) if by == "manifest" else sign(path)
    assert fst.load_file(path, verify=request).keys() == TENSORS.keys()
    index = (path / INDEX).read_bytes()
    for edit in EDITS.values():
        edit_index(path, edit)
        for load in LOADS.values():
            for named in (path, path / INDEX):
                with pytest.raises(fst.IntegrityError, match=rf"{INDEX}: .*the {by} states sha256:"):
                    load(named, verify=request)
        (path / INDEX).write_bytes(index)


def test_an_index_without_a_digest_names_all_files_of_the_manifest(path):
    save(path, key=None)
    manifest = manifest_in(path, "*.safetensors")
    assert fst.load_file(path, verify=manifest).keys() == TENSORS.keys()
    assert fst.load_file(path / INDEX, verify={f"model/{name}": digest for name, digest in manifest.items()})
    (path / "sub").mkdir()
    save_with_safetensors(TENSORS, path / "sub" / "other.safetensors")
    below = {"sub/other.safetensors": manifest_in(path / "sub")["other.safetensors"]}
    index = (path / INDEX).read_bytes()
    patterns = {"left out": FILES[2], "emptied": "names no file", "exchanged": FILES[0]}
    for edit, pattern in patterns.items():
        edit_index(path, EDITS[edit])
        for load in LOADS.values():
            with pytest.raises(fst.IntegrityError, match=f"{INDEX}: .*{pattern}"):
                load(path, verify={**manifest, **below})
        (path / INDEX).write_bytes(index)
    # The files of an index may be some of those in the manifest. Then its digest is required.
    save_with_safetensors(TENSORS, path / "other.safetensors")
    manifest = manifest_in(path, "*.safetensors")
    with pytest.raises(fst.IntegrityError, match=r'"other.safetensors" is not among its files'):
        fst.load_file(path, verify=manifest)
    # The caller may name files.
    assert fst.load_files([path / file for file in FILES[:2]], verify=manifest).keys() == {"a", "b"}


def test_a_signature_without_the_index_binds_its_files(path, sign):
    save(path, key=None)
    index = (path / INDEX).rename(path.parent / INDEX)
    signature = sign(path)
    index.rename(path / INDEX)
    assert fst.load_file(path, verify=signature).keys() == TENSORS.keys()
    edit_index(path, EDITS["left out"])
    with pytest.raises(fst.IntegrityError, match="the signature lists it"):
        fst.load_file(path, verify=signature)


def test_a_directory_without_an_index_has_all_files(path):
    save(path, key=None)
    manifest = manifest_in(path)
    (path / INDEX).unlink()
    assert fst.load_file(path, verify=manifest).keys() == TENSORS.keys()
    (path / FILES[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of the 3 shards are missing: {FILES[1]}"):
        fst.load_file(path, verify=manifest)


def test_other_directories_of_a_manifest_are_not_missing(path):
    for name in ("one", "two"):
        (path / name).mkdir()
        save(path / name, key=None)
    files = {f"{name}/{file}": digest for name in ("one", "two") for file, digest in manifest_in(path / name).items()}
    manifest = {file: digest for file, digest in files.items() if not file.endswith(INDEX)}
    assert fst.load_file(path / "two", verify=manifest).keys() == TENSORS.keys()


def test_encrypted_shards_are_bound_to_each_other(path, tmp_path):
    save(path)
    older = tmp_path / "older"
    older.mkdir()
    save(older, factor=10)
    shards = [path / file for file in FILES]
    assert fst.load_file(path, encryption_key=KEY)["c"].equal(TENSORS["c"])
    assert fst.metadata(shards[0], encryption_key=KEY) == {}
    # The caller may name some files of one save.
    assert fst.load_files(shards[1:], encryption_key=KEY).keys() == {"b", "c"}
    assert fst.load_file(shards[0], encryption_key=KEY).keys() == {"a"}

    kept = shutil.copytree(path, tmp_path / "kept")
    edit_index(path, EDITS["left out"])
    check_refused(path, "encrypted file 3 of 3 of the save is missing")
    (path / INDEX).unlink()
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of the 3 shards are missing: {FILES[1]}"):
        fst.load_file(path, encryption_key=KEY)
    shutil.copytree(kept, path, dirs_exist_ok=True)

    other = fst.EncryptionKey.random()
    fst.rotate_key(path, KEY, other)
    assert fst.load_file(path, encryption_key=other)["c"].equal(TENSORS["c"])
    with pytest.raises(fst.IntegrityError, match="another key"):
        fst.load_file(path, encryption_key=KEY)
    with pytest.raises(TypeError, match="two keys"):
        fst.rotate_key(path, other, None)
    fst.rotate_key(path, other, KEY)

    shutil.copy(older / FILES[1], shards[1])
    check_refused(path, f"{FILES[1]}: .*belongs to another save")
    with pytest.raises(fst.IntegrityError, match="belong to other saves"):
        fst.load_files(shards, encryption_key=KEY)
    # A file of no shards, too.
    fst.save_file({"b": TENSORS["b"]}, shards[1], encryption_key=KEY)
    check_refused(path, "belongs to another save")
    with pytest.raises(fst.IntegrityError, match="belong to other saves"):
        fst.load_files(shards, encryption_key=KEY)


def check_refused(path: Path, pattern: str) -> None:
    for load in (fst.load_file, fst.safe_open, fst.tensor_names, lambda path, **key: fst.verify(path, **key)):
        with pytest.raises(fst.IntegrityError, match=pattern):
            load(path, encryption_key=KEY)


def test_complete_saves_load_together(path, tmp_path):
    save(path)
    more = tmp_path / "more.safetensors"
    fst.save_file({"more": torch.ones(3)}, more, encryption_key=KEY)
    assert fst.load_files([path, more], encryption_key=KEY).keys() == {*TENSORS, "more"}


def test_registered_keys_bind_shards(path):
    with registered(fst.EncryptionKey.from_bytes(KEY.to_bytes(), label="bound")):
        metadata = {"fst.encryption": "bound"}
        fst.save_file(TENSORS, path / "model.safetensors", metadata, max_shard_bytes=400)
        edit_index(path, EDITS["left out"])
        with pytest.raises(fst.IntegrityError, match="file 3 of 3"):
            fst.load_file(path)
    with safetensors_open(path / FILES[0], "pt") as file:
        save_id, _, place = file.metadata()["fst.encryption.shard"].partition(":")
        assert (len(save_id), place) == (32, "1:3")
