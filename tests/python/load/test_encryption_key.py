"""Encrypted files: saves and loads with a key, and what is refused without it."""

import base64
import contextlib
import copy
import fcntl
import functools
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open as safetensors_open
from safetensors.torch import save_file as safetensors_save
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fst
import fst.torch as fst_torch
from forked import run_in_fork
from rank_processes import on_ranks
from rawfile import assert_all_same
from saved import KEY, damage, manifest_of, registered, write_each

TENSORS = {
    "large": torch.arange(900_000, dtype=torch.float32).reshape(1000, 900),
    "bytes": torch.arange(201, dtype=torch.uint8),
    "strided": torch.arange(60_000, dtype=torch.bfloat16).reshape(200, 300).t(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    fst.save_file(TENSORS, path, {"format": "pt"}, encryption_key=KEY)
    return path


def assert_loaded(tensors: dict[str, Tensor]) -> None:
    assert_all_same(tensors, TENSORS)


REQUEST = {"fst.encryption": "my models"}


@pytest.fixture
def labeled() -> Iterator[None]:
    with registered(fst.EncryptionKey.from_bytes(KEY.to_bytes(), "my models")):
        yield


def save_with_operator(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    torch.ops.fst.save_file(list(tensors.values()), list(tensors), str(path), metadata=metadata)


def save_contiguous(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    fst_torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


@pytest.mark.usefixtures("labeled")
@pytest.mark.parametrize(
    ("save", "encryption"),
    [
        *product(
            [
                fst.save_file,
                lambda *arguments, **options: fst.save_file_async(*arguments, **options).result(),
                lambda tensors, path, **options: write_each(path, tensors, **options),
                functools.partial(fst.save_file, max_shard_bytes=100_000),
            ],
            [{"encryption_key": KEY, "metadata": {"format": "pt"}}, {"metadata": {"format": "pt"} | REQUEST}],
        ),
        (save_with_operator, {"metadata": {"format": "pt"} | REQUEST}),
        (save_contiguous, {"metadata": {"format": "pt"} | REQUEST}),
    ],
)
def test_every_save_takes_a_key_or_its_label(
    tmp_path: Path, save: Callable[..., object], encryption: dict[str, Any]
) -> None:
    path = tmp_path / "model.safetensors"
    path.touch(0o640)
    save(TENSORS, path, **encryption)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 or not isinstance(save, functools.partial)
    assert len(os.listdir(tmp_path)) == len(shards) + (len(shards) > 1)
    for shard in shards:
        assert shard.stat().st_mode & 0o777 == 0o640
        assert fst.metadata(shard, encryption_key=KEY) == {"format": "pt"}
    assert_loaded(fst.load_file(tmp_path, encryption_key=KEY))


@pytest.mark.parametrize(("key", "max_shard_bytes"), [(None, 10_000_000), (KEY, None), (KEY, 10_000_000)])
def test_profile_has_a_span_of_each_save(
    tmp_path: Path, key: fst.EncryptionKey | None, max_shard_bytes: int | None
) -> None:
    path = tmp_path / "model.safetensors"
    with fst.profile() as profile:
        fst.save_file(TENSORS, path, max_shard_bytes=max_shard_bytes, encryption_key=key)
    profile.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [save] = [event["args"] for event in events if event["name"] == "save"]
    assert save["paths"] == [str(path)]
    assert save["tensors"] == len(TENSORS)
    tensor_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
    assert save["bytes"] == (path.stat().st_size if key is None else tensor_bytes)
    if key is not None:
        assert profile.summary().stages["cipher"].bytes == tensor_bytes


def test_handlers_of_signals_run_while_a_rotation_waits(tmp_path: Path) -> None:
    """Also behind the first file, and the files that are rotated by then do not end the call."""
    new = fst.EncryptionKey.random()
    fst.save_file(TENSORS, tmp_path / "model.safetensors", max_shard_bytes=1000, encryption_key=KEY)
    with contextlib.ExitStack() as locks:
        for path in sorted(tmp_path.glob("*.safetensors"))[1:]:
            fcntl.flock(locks.enter_context(path.open("rb+")), fcntl.LOCK_EX)
        before = signal.signal(signal.SIGALRM, lambda *_: locks.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.25)
            fst.rotate_key(tmp_path, KEY, new)
        finally:
            signal.signal(signal.SIGALRM, before)
    assert_loaded(fst.load_file(tmp_path, encryption_key=new))


@pytest.mark.parametrize("name", ["__crypto_keys__", "__encryption__"])
def test_files_of_cryptotensors_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_save({"weight": torch.ones(4)}, path, {name: "{}"})
    before = path.read_bytes()
    message = r"model\.safetensors: .*encrypted by CryptoTensors, which fst does not read; decrypt"
    for read in (
        fst.load_file,
        lambda path: fst.load_file(path, encryption_key=KEY),
        lambda path: torch.ops.fst.load_file(str(path)),
        lambda path: fst.load_file(path, verify=True),
        lambda path: fst.rotate_key(path, KEY, fst.EncryptionKey.random()),
    ):
        with registered(), pytest.raises(ValueError, match=message):
            read(path)
    assert path.read_bytes() == before


def test_loads_of_parts_and_modules_decrypt(path: Path, tmp_path: Path) -> None:
    """test_one_path.py has the other loads."""
    with fst.safe_open(path, encryption_key=KEY) as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == TENSORS.keys()
        for index in ((slice(300, 700, 7), slice(5, 800)), slice(10, 990), (slice(None), slice(5, 800))):
            with fst.profile() as profile:
                part = file.get_slice("large")[index]
            torch.testing.assert_close(part, TENSORS["large"][index], rtol=0, atol=0)
            # Each of the four chunks is decrypted once.
            assert profile.summary().stages["cipher"].bytes <= TENSORS["large"].nbytes
    source, target = torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)
    fst.save_file(source.state_dict(), tmp_path / "linear.safetensors", encryption_key=KEY)
    fst.load_module(target, tmp_path / "linear.safetensors", encryption_key=KEY)
    assert torch.equal(source.weight, target.weight)
    assert fst.load_files([path, tmp_path / "linear.safetensors"], encryption_key=KEY).keys() == {
        *TENSORS,
        "weight",
        "bias",
    }


@pytest.mark.parametrize("strategy", ["own", "exchange"])
@on_ranks(2)
def test_ranks_load_with_the_key(path: Path, strategy: Literal["own", "exchange"]) -> None:
    placements = {"large": Shard(0), "*": Replicate()}
    loaded = fst.load_sharded(path, placements, strategy=strategy, window_bytes=100_000, encryption_key=KEY)
    expected = TENSORS["large"].chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(loaded["large"], expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded["strided"], TENSORS["strided"], rtol=0, atol=0)
    with pytest.raises((ValueError, fst.RankError), match="encrypted"):
        fst.load_sharded(path, Replicate(), strategy=strategy)


@on_ranks(2)
def test_other_loads_of_ranks(path: Path) -> None:
    with fst.stream_sharded(path, Replicate(), encryption_key=KEY) as tensors:
        assert_loaded(dict(tensors))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    loaded = fst.load_distributed(path, mesh, {"large": Shard(1), "*": Replicate()}, verify=True, encryption_key=KEY)
    torch.testing.assert_close(loaded["large"].full_tensor(), TENSORS["large"], rtol=0, atol=0)
    with registered():
        assert_loaded(fst.load_sharded(path, Replicate()))


def test_operators_decrypt_with_a_registered_key(path: Path) -> None:
    with registered():
        assert_loaded(torch.ops.fst.load_file(str(path)))
        assert torch.ops.fst.tensor_names([str(path)]) == fst.tensor_names(path)
        compiled = torch.compile(lambda: fst.load_tensors(str(path), ["large"])[0] + 1, fullgraph=True)
        torch.testing.assert_close(compiled(), TENSORS["large"] + 1, rtol=0, atol=0)
        assert_loaded(fst_torch.load_file(path))
        run_in_fork(lambda: fst.load_file(path))
        # Another key, and files without encryption, do not disturb.
        with pytest.raises(fst.IntegrityError, match="another key"):
            fst.load_file(path, encryption_key=fst.EncryptionKey.random())
        fst.save_file(TENSORS, path)
        assert_loaded(fst.load_file(path))


def test_refused_labels(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(label: str, **more: str) -> None:
        metadata = {"fst.encryption": label, **more}
        torch.ops.fst.save_file([torch.ones(3)], ["x"], str(path), metadata=metadata)

    before = path.read_bytes()
    with pytest.raises(ValueError, match=r'model\.safetensors: no key with the label "my models" is registered'):
        save("my models")
    keys = [fst.EncryptionKey.random("my models") for _ in range(2)]
    keys[0].register()
    with pytest.raises(ValueError, match="no key with the label"):
        save("")
    with pytest.raises(ValueError, match="at most 64 bytes"):
        save(safetensors_open(path, "pt").metadata()["fst.encryption"])
    with pytest.raises(ValueError, match="digests"):
        save("my models", **{"fst.digests": "blake3"})
    with pytest.raises(ValueError, match="save_file"):
        torch.ops.fst.serialize([torch.ones(3)], ["x"], metadata=REQUEST)
    keys[1].register()
    with pytest.raises(ValueError, match="several keys"):
        save("my models")
    for key in keys:
        key.unregister()
    assert path.read_bytes() == before
    # The key of the environment has no label.
    (tmp_path / "model.key").write_bytes(KEY.to_bytes())
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "model.key"))
    save("")
    assert torch.equal(fst.load_file(path, encryption_key=KEY)["x"], torch.ones(3))


def test_several_keys_may_be_registered(tmp_path: Path, path: Path) -> None:
    other = fst.EncryptionKey.random()
    more = tmp_path / "more.safetensors"
    fst.save_file({"more": torch.ones(3)}, more, encryption_key=other)
    with registered():
        with pytest.raises(fst.IntegrityError, match="another key"):
            fst.load_files([path, more])
        with registered(other):
            assert len(fst.load_files([path, more])) == len(TENSORS) + 1
    # The key is not registered anymore.
    KEY.unregister()
    with pytest.raises(ValueError, match="register"):
        fst.load_file(path)


def test_the_environment_names_a_key_file(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = tmp_path / "model.key"
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(key_file))
    with pytest.raises(FileNotFoundError, match=r"model\.key"):
        fst.load_file(path)
    key_file.write_text(KEY.to_bytes().hex() + "\n")
    assert_loaded(fst.load_file(path))
    key_file.write_text(KEY.to_bytes().hex()[1:])
    with pytest.raises(ValueError, match="hexadecimal"):
        fst.load_file(path)


def test_the_environment_names_a_passphrase_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, file = tmp_path / "m.safetensors", tmp_path / "passphrase"
    key = fst.EncryptionKey.from_passphrase("of two words", passes=1, memory_bytes=8192)
    fst.save_file(TENSORS, path, encryption_key=key)
    monkeypatch.setenv("FST_ENCRYPTION_PASSPHRASE_FILE", str(file))
    with pytest.raises(FileNotFoundError, match="passphrase"):
        fst.load_file(path)
    for end in ("", "\n", "\r\n"):
        file.write_bytes(f"of two words{end}".encode())
        assert_loaded(fst.load_file(path))
    # Another passphrase is not confused with the one that was read before.
    for other in ("of two words\n\n", "another"):
        file.write_text(other)
        with pytest.raises(fst.IntegrityError, match="key"):
            fst.load_file(path)
    for content, message in (("\n", "empty"), ("x" * 1025, "at most 1024")):
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"passphrase: .*{message}"):
            fst.load_file(path)


def test_verify_authenticates_all_data(path: Path) -> None:
    fst.verify(path, encryption_key=KEY)
    damage(path, "large")
    damage(path, "bytes", 0)
    with pytest.raises(fst.IntegrityError, match=r'tensor "(large|bytes)": byte .*1 more'):
        fst.verify(path, encryption_key=KEY)


def test_manifests_have_digests_of_the_encrypted_bytes(path: Path) -> None:
    manifest = manifest_of(path)
    fst.verify(path, manifest)
    fst.verify(path, manifest, encryption_key=KEY)
    assert_loaded(fst.load_file(path, verify=manifest, encryption_key=KEY))
    assert_loaded(dict(fst.stream(path, verify=manifest, encryption_key=KEY)))
    damage(path, "scalar", 0)
    # A load of another tensor does not see the change.
    for load in (fst.verify, lambda *arguments: fst.load_tensors(path, ["bytes"], verify=manifest, encryption_key=KEY)):
        with pytest.raises(fst.IntegrityError, match="digest of the file"):
            load(path, manifest)


def test_without_the_key_no_encrypted_bytes_are_returned(path: Path) -> None:
    for load in (
        fst.load_file,
        fst.safe_open,
        fst.tensor_names,
        fst.metadata,
        fst.verify,
        lambda path: fst.load_tensors(path, ["large"]),
        lambda path: fst.load_into(path, ["bytes"], [torch.zeros(201, dtype=torch.uint8)]),
        lambda path: list(fst.stream(path)),
        lambda path: fst.load_module(torch.nn.Linear(1, 1), path),
    ):
        with pytest.raises(ValueError, match="encrypted"):
            load(path)


def test_shards_of_one_save_share_a_salt(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    key = fst.EncryptionKey.from_passphrase("open sesame", passes=1, memory_bytes=64 << 10)
    salts = []
    for _ in range(2):
        fst.save_file(TENSORS, path, max_shard_bytes=100_000, encryption_key=key)
        texts = [safetensors_open(shard, "pt").metadata()["fst.encryption"] for shard in tmp_path.glob("*.safetensors")]
        slots = [base64.urlsafe_b64decode(text.split(":")[4]) for text in texts]
        assert len(slots) > 1
        salts.append({slot[16:32] for slot in slots})
        assert_loaded(fst.load_file(tmp_path, encryption_key=key))
    assert len(salts[0]) == len(salts[1]) == len(salts[0] | salts[1]) - 1


def test_keys_come_from_files_and_callbacks(tmp_path: Path, path: Path) -> None:
    for name, content in {"raw": KEY.to_bytes(), "hex": KEY.to_bytes().hex().encode() + b"\n"}.items():
        (tmp_path / name).write_bytes(content)
        assert_loaded(fst.load_file(path, encryption_key=fst.EncryptionKey.from_file(tmp_path / name)))
    (tmp_path / "bad").write_bytes(b"short")
    with pytest.raises(ValueError, match="bad: a key has 32 bytes"):
        fst.EncryptionKey.from_file(tmp_path / "bad")
    with pytest.raises(TypeError, match="EncryptionKey"):
        fst.load_file(path, encryption_key=b"bytes")
    with pytest.raises(ValueError, match="empty"):
        fst.EncryptionKey.from_passphrase("")
    with pytest.raises(ValueError, match="does not return"):
        fst.EncryptionKey.from_passphrase("open sesame").to_bytes()
    calls = []
    key = fst.EncryptionKey.from_callback(lambda: calls.append(1) or KEY.to_bytes())
    assert not calls
    assert_loaded(fst.load_file(path, encryption_key=key))
    assert len(calls) == 1


def test_callers_may_overwrite_their_buffers(path: Path) -> None:
    buffer = bytearray(KEY.to_bytes())
    key = fst.EncryptionKey.from_bytes(buffer)
    buffer[:] = bytes(32)
    assert key.to_bytes() == KEY.to_bytes()
    assert_loaded(fst.load_file(path, encryption_key=key))
    # A callback may return its buffer, too.
    assert type(fst.EncryptionKey.from_callback(lambda: buffer).to_bytes()) is bytes


def test_keys_are_never_shown() -> None:
    assert repr(KEY) == "EncryptionKey(<hidden>)"
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leak(KEY)
    with pytest.raises(RuntimeError):
        torch.save(KEY._open()._object, "/dev/null")
