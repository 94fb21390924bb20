"""Copies of keys in the memory of a process, searched from outside."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from forked import ForkedProgram
from suite import CHECKOUT

pytest.importorskip("cryptography")
sys.path.append(str(CHECKOUT / "tests" / "encryption"))
import reference

# Saves by label, loads and rotates with keys of files that Python does not read. Then waits for its end.
PROGRAM = """
import gc, signal, sys, torch, fst

for path in sys.argv[1:]:
    if path.endswith(".passphrase"):
        secret = bytearray(32)
        with open(path, "rb", buffering=0) as file:
            file.readinto(secret)
        tensor = torch.frombuffer(secret, dtype=torch.uint8)
        key = torch.classes.fst.EncryptionKey(tensor, "label", [1, 1 << 20], None)
        tensor.zero_()
    else:
        key = torch.classes.fst.EncryptionKey.of_file(path, "label")
    key.set_registered(True)
    model = path + ".safetensors"
    torch.ops.fst.save_file([torch.ones(1 << 20)], ["w"], model, metadata={"fst.encryption": "label"})
    torch.ops.fst.load_file(model)
    torch.ops.fst.load_slices([model], ["w"], [0], [5], [9])
    key.rotate(model, key)
    key.set_registered(False)
    del key
    gc.collect()
print("ready", flush=True)
signal.pause()
"""


def secrets_of(model: Path, content: bytes, secret: bytes) -> dict[str, bytes]:
    """Returns the keys of a file, by their names in docs/encryption.md."""
    _, cipher, _, _, *slots = safe_open(model, "pt").metadata()["fst.encryption"].split(":")
    [slot] = filter(any, map(reference.decode, slots))
    passes, memory_bytes, salt = int.from_bytes(slot[4:8], "little"), int.from_bytes(slot[8:16], "little"), slot[16:32]
    user_key = reference.derive(secret, passes, memory_bytes, salt) if passes else secret
    file_key = reference.unwrap(slot, user_key, cipher)
    prk = reference.extract(b"", file_key)
    return {
        "content of the file": content,
        "user key": user_key,
        "wrap key": reference.expand(reference.extract(slot[112:144], user_key), "wrap", 32),
        "file key": file_key,
        "data key": reference.expand(prk, f"data {cipher}", 32),
        "header key": reference.expand(prk, "header", 32),
    }


def count_copies(pid: int, secrets: dict[str, bytes]) -> dict[str, int]:
    """Returns the number of copies of each secret in the memory of a child process, except for those without any."""
    found = dict.fromkeys(secrets, 0)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            begin, end, mode = re.match("([0-9a-f]+)-([0-9a-f]+) (....)", line).groups()
            if mode.startswith("rw") and "/dev/" not in line:
                memory.seek(int(begin, 16))
                content = memory.read(int(end, 16) - int(begin, 16))
                for name, secret in secrets.items():
                    found[name] += content.count(secret)
    return {name: count for name, count in found.items() if count}


def test_no_key_stays_in_memory(tmp_path: Path, start_python: Callable[..., ForkedProgram]) -> None:
    own = {tmp_path / f"key.{kind}": os.urandom(32) for kind in ("hex", "passphrase")}
    contents = {path: secret.hex().encode() if path.suffix == ".hex" else secret for path, secret in own.items()}
    for path, content in contents.items():
        path.write_bytes(content)
    process = start_python(PROGRAM, *map(str, own))
    assert process.readline() == "ready"
    secrets = {
        f"{name} of {path.name}": secret
        for path in own
        for name, secret in secrets_of(Path(f"{path}.safetensors"), contents[path], own[path]).items()
    }
    assert len(secrets) == 12
    assert count_copies(process.pid, secrets) == {}
