"""Keys on the command line, and commands on encrypted files."""

import errno
import json
import os
import stat

import pytest
import torch

import fst
from fst.compat.tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from rawfile import assert_all_same
from saved import flip_bit


@pytest.fixture
def key(command, tmp_path):
    """Writes a new key to the file `a.key`, and returns it."""
    assert command("key", "new", "a.key").returncode == 0
    return bytes.fromhex((tmp_path / "a.key").read_text())


@pytest.fixture
def encrypted(command, key, tmp_path):
    """Converts a file to an encrypted one."""
    fst.save_file({"weight": torch.arange(6.0)}, tmp_path / "plain.safetensors")
    path = tmp_path / "secret.safetensors"
    assert command("convert", "plain.safetensors", path, "--encrypt", "a.key").returncode == 0
    return path


@pytest.fixture
def tensorizer_file(key, tmp_path):
    """Writes an encrypted file in tensorizer's format."""
    path = tmp_path / "m.tensors"
    with TensorSerializer(path, encryption=EncryptionParams(key)) as serializer:
        serializer.write_state_dict({"weight": torch.arange(6.0), "steps": torch.arange(3)})
    return path


def test_keys_are_written_once_and_for_their_owner(command, tmp_path):
    result = command("key", "new", "a.key")
    key = tmp_path / "a.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_text().strip() not in result.stdout
    content = key.read_bytes()
    refused = command("key", "new", "a.key")
    assert (refused.returncode, key.read_bytes()) == (1, content)
    assert refused.stderr.startswith("fst: a.key: exists, and may be the key of files")


def test_key_that_is_not_written(command, tmp_path, monkeypatch):
    """The error names the path, and no empty file stays, which would look like a key."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused = command("key", "new", "a.key")
    assert (refused.returncode, list(tmp_path.iterdir())) == (1, [])
    assert refused.stderr.startswith("fst: a.key: the key was not written: No space left on device")


@pytest.mark.parametrize("file", ["encrypted", "tensorizer_file"])
def test_commands_read_encrypted_files(command, request, tmp_path, monkeypatch, file):
    path = request.getfixturevalue(file)
    for name in ("inspect", "verify", "time"):
        failed = command(name, path)
        assert failed.returncode == 1
        assert "FST_ENCRYPTION_KEY_FILE" in failed.stdout + failed.stderr
    assert command("convert", path, "back.safetensors").returncode == 1
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "a.key"))
    assert command("time", path).returncode == 0
    shown = command("inspect", path)
    assert shown.returncode == 0
    assert "weight" in shown.stdout
    assert ", encrypted: " in shown.stdout
    assert json.loads(command("inspect", path, "--json").stdout)["encrypted"] is True
    verified = command("verify", path)
    assert verified.returncode == 0
    authenticated = "1 tensor and the header" if file == "encrypted" else "2 tensors"
    assert f"{authenticated} authenticated" in verified.stdout
    for target in ("back.safetensors", "back.tensors"):
        assert "--decrypt" in command("convert", path, target).stderr
        assert command("convert", path, target, "--decrypt").returncode == 0
        assert torch.equal(fst.load_file(tmp_path / target)["weight"], torch.arange(6.0))
    assert json.loads(command("inspect", tmp_path / "back.tensors", "--json").stdout)["encrypted"] is False
    assert "hashes of back.tensors" in command("verify", "back.tensors").stdout
    # The last byte of the data of the last tensor, which in tensorizer's format is before a number.
    flip_bit(path, -1 if file == "encrypted" else -9)
    result = command("verify", path)
    assert result.returncode == 1
    assert "WRONG" in result.stdout
    assert "authentication code" in result.stdout


def test_convert_encrypts_files_of_tensorizer(command, key, tmp_path):
    tensors = {"weight": torch.randn(300, 400), "steps": torch.arange(3), "empty": torch.zeros(0)}
    fst.save_file(tensors, tmp_path / "plain.safetensors")
    assert command("convert", "plain.safetensors", "m.tensors", "--encrypt", "a.key").returncode == 0
    with pytest.raises(ValueError, match="encrypted"):
        fst.load_file(tmp_path / "m.tensors")
    with TensorDeserializer(tmp_path / "m.tensors", "cpu", encryption=DecryptionParams.from_key(key)) as found:
        assert list(found) == fst.tensor_names(tmp_path / "plain.safetensors")
        assert_all_same(found, tensors)


def test_rotate(command, encrypted, tensorizer_file):
    command("key", "new", "b.key")
    assert command("key", "rotate", encrypted, "a.key", "b.key").returncode == 0
    new = fst.EncryptionKey.from_file(encrypted.with_name("b.key"))
    assert torch.equal(fst.load_file(encrypted, encryption_key=new)["weight"], torch.arange(6.0))
    assert command("key", "rotate", encrypted, "a.key", "b.key").returncode == 1
    refused = command("key", "rotate", tensorizer_file, "a.key", "a.key")
    assert refused.returncode == 1
    assert "cannot be replaced" in refused.stderr
