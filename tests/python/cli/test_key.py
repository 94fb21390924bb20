"""Keys on the command line, and commands on encrypted files."""

import stat

import pytest
import torch

import fst


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
