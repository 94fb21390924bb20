"""Keys on the command line, and commands on encrypted files."""

import json
import stat

import pytest
import torch

import fst
from fst.compat.tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer


@pytest.fixture
def encrypted(command, tmp_path):
    """Converts a file to an encrypted one, with a new key."""
    fst.save_file({"weight": torch.arange(6.0)}, tmp_path / "plain.safetensors")
    assert command("key", "new", "a.key").returncode == 0
    path = tmp_path / "secret.safetensors"
    assert command("convert", "plain.safetensors", path, "--encrypt", "a.key").returncode == 0
    return path


def test_keys_are_written_once_and_for_their_owner(command, tmp_path):
    result = command("key", "new", "a.key")
    key = tmp_path / "a.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_text().strip() not in result.stdout
    content = key.read_bytes()
    assert command("key", "new", "a.key").returncode == 1
    assert key.read_bytes() == content


def test_commands_read_encrypted_files(command, encrypted, monkeypatch):
    for name in ("inspect", "verify", "load"):
        failed = command(name, encrypted)
        assert failed.returncode == 1
        assert "FST_ENCRYPTION_KEY_FILE" in failed.stdout + failed.stderr
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(encrypted.with_name("a.key")))
    for name in ("inspect", "verify", "load"):
        assert command(name, encrypted).returncode == 0
    assert command("convert", encrypted, "back.safetensors").returncode == 0
    assert encrypted.with_name("back.safetensors").read_bytes() == encrypted.with_name("plain.safetensors").read_bytes()


@pytest.fixture
def tensorizer_file(command, tmp_path):
    """Writes an encrypted file in tensorizer's format, with a new key."""
    command("key", "new", "a.key")
    path = tmp_path / "m.tensors"
    key = bytes.fromhex((tmp_path / "a.key").read_text())
    with TensorSerializer(path, encryption=EncryptionParams(key)) as serializer:
        serializer.write_state_dict({"weight": torch.arange(6.0), "steps": torch.arange(3)})
    return path


def test_commands_read_encrypted_files_of_tensorizer(command, tensorizer_file, tmp_path, monkeypatch):
    for name in ("inspect", "verify", "load"):
        failed = command(name, tensorizer_file)
        assert failed.returncode == 1
        assert "FST_ENCRYPTION_KEY_FILE" in failed.stdout + failed.stderr
    assert command("convert", tensorizer_file, "back.safetensors").returncode == 1
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "a.key"))
    shown = command("inspect", tensorizer_file)
    assert shown.returncode == 0
    assert "weight" in shown.stdout
    assert "48 B, encrypted: " in shown.stdout
    assert json.loads(command("inspect", tensorizer_file, "--json").stdout)["encrypted"] is True
    verified = command("verify", tensorizer_file)
    assert verified.returncode == 0
    assert "2 tensors authenticated" in verified.stdout
    for target in ("back.safetensors", "back.tensors"):
        assert command("convert", tensorizer_file, target).returncode == 0
        assert torch.equal(fst.load_file(tmp_path / target)["weight"], torch.arange(6.0))
    assert json.loads(command("inspect", tmp_path / "back.tensors", "--json").stdout)["encrypted"] is False


@pytest.mark.parametrize("form", ["hexadecimal", "bytes"])
def test_convert_encrypts_files_of_tensorizer(command, tmp_path, form):
    secret = bytes(range(32))
    (tmp_path / "a.key").write_bytes(secret if form == "bytes" else secret.hex().encode())
    tensors = {"weight": torch.randn(300, 400), "steps": torch.arange(3), "empty": torch.zeros(0)}
    fst.save_file(tensors, tmp_path / "plain.safetensors")
    assert command("convert", "plain.safetensors", "m.tensors", "--encrypt", "a.key").returncode == 0
    written = (tmp_path / "m.tensors").read_bytes()
    assert tensors["weight"].numpy().tobytes() not in written
    key = fst.EncryptionKey.from_bytes(secret)
    with pytest.raises(ValueError, match="encrypted"):
        fst.load_file(tmp_path / "m.tensors")
    assert fst.tensor_names(tmp_path / "m.tensors", encryption_key=key) == fst.tensor_names(
        tmp_path / "plain.safetensors"
    )
    loaded = fst.load_file(tmp_path / "m.tensors", encryption_key=key)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with TensorDeserializer(tmp_path / "m.tensors", encryption=DecryptionParams.from_key(secret)) as deserializer:
        assert torch.equal(deserializer["weight"], tensors["weight"])


def test_commands_take_passphrases(command, tmp_path, monkeypatch):
    encryption = EncryptionParams.from_string("two words", EncryptionParams.OpsLimit.MIN, EncryptionParams.MemLimit.MIN)
    with TensorSerializer(tmp_path / "m.tensors", encryption=encryption) as serializer:
        serializer.write_state_dict({"weight": torch.arange(6.0)})
    (tmp_path / "passphrase").write_text("two words\n")
    monkeypatch.setenv("FST_ENCRYPTION_PASSPHRASE_FILE", str(tmp_path / "passphrase"))
    for arguments in (("inspect",), ("verify",), ("load",)):
        assert command(*arguments, "m.tensors").returncode == 0
    assert command("convert", "m.tensors", "back.safetensors").returncode == 0
    (tmp_path / "passphrase").write_text("other words\n")
    result = command("verify", "m.tensors")
    assert result.returncode == 1
    assert "authentication code" in result.stdout


def test_verify_finds_changed_files_of_tensorizer(command, tensorizer_file, tmp_path, monkeypatch):
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "a.key"))
    content = bytearray(tensorizer_file.read_bytes())
    # The last byte of the data of the last tensor, before the number after it.
    content[-9] ^= 1
    tensorizer_file.write_bytes(content)
    result = command("verify", tensorizer_file)
    assert result.returncode == 1
    assert "steps" in result.stdout
    assert "authentication code" in result.stdout
    refused = command("key", "rotate", tensorizer_file, "a.key", "a.key")
    assert refused.returncode == 1
    assert "cannot be replaced" in refused.stderr


def test_verify_finds_a_changed_chunk(command, encrypted, monkeypatch):
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(encrypted.with_name("a.key")))
    content = bytearray(encrypted.read_bytes())
    content[-1] ^= 1
    encrypted.write_bytes(content)
    result = command("verify", encrypted)
    assert result.returncode == 1
    assert "WRONG" in result.stdout


def test_rotate(command, encrypted):
    command("key", "new", "b.key")
    assert command("key", "rotate", encrypted, "a.key", "b.key").returncode == 0
    new = fst.EncryptionKey.from_file(encrypted.with_name("b.key"))
    assert torch.equal(fst.load_file(encrypted, encryption_key=new)["weight"], torch.arange(6.0))
    assert command("key", "rotate", encrypted, "a.key", "b.key").returncode == 1
