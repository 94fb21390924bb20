"""Second implementation of docs/encryption.md, with the package cryptography. It makes the vectors beside this file.

python reference.py make                    # writes the files and vectors.json
python reference.py open FILE KEY_IN_HEX    # prints the SHA-256 of each tensor
"""

import base64
import hashlib
import hmac
import json
import struct
import sys
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

HERE = Path(__file__).parent
CIPHERS = {"aes-256-gcm": AESGCM, "chacha20-poly1305": ChaCha20Poly1305}
TAGS = "fst.encryption.tags"
SECRETS = ":".join(("A" * 43, "A" * 256, "A" * 256))


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def extract(salt: bytes, key: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), key, "sha256")


def expand(prk: bytes, use: str, length: int) -> bytes:
    return HKDFExpand(SHA256(), length, f"fst.encryption 1 {use}".encode()).derive(prk)


def nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def wrap(file_key: bytes, user_key: bytes, cipher: str, wrap_salt: bytes, label: str = "", argon: tuple = ()) -> bytes:
    """Makes a key slot. `argon` has passes, memory in bytes and salt."""
    passes, memory, salt = argon or (0, 0, bytes(16))
    clear = struct.pack("<B3xIQ16s64s", 2 if argon else 1, passes, memory, salt, label.encode())
    clear += expand(extract(b"", user_key), "id", 16) + wrap_salt
    return clear + CIPHERS[cipher](expand(extract(wrap_salt, user_key), "wrap", 32)).encrypt(nonce(0), file_key, clear)


def unwrap(slot: bytes, user_key: bytes, cipher: str) -> bytes:
    return CIPHERS[cipher](expand(extract(slot[112:144], user_key), "wrap", 32)).decrypt(
        nonce(0), slot[144:], slot[:144]
    )


def derive(passphrase: bytes, passes: int, memory: int, salt: bytes) -> bytes:
    return Argon2id(salt=salt, length=32, iterations=passes, lanes=1, memory_cost=memory // 1024).derive(passphrase)


def encrypt(tensors: dict, metadata: dict, file_key: bytes, cipher: str, chunk_bytes: int, slots: list) -> bytes:
    """Returns a file. `tensors` has (dtype, shape, data) by name."""
    prk = extract(b"", file_key)
    aead = CIPHERS[cipher](expand(prk, f"data {cipher}", 32))
    header, body, tags, number = {}, b"", b"", 0
    header["__metadata__"] = metadata | {"fst.encryption": f"1:{cipher}:{chunk_bytes}:{SECRETS}"}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        for begin in range(0, len(data), chunk_bytes):
            sealed = aead.encrypt(nonce(number), data[begin : begin + chunk_bytes], b"")
            body, tags, number = body + sealed[:-16], tags + sealed[-16:], number + 1
    header[TAGS] = {"dtype": "U8", "shape": [len(tags)], "data_offsets": [len(body), len(body) + len(tags)]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    before = struct.pack("<Q", len(encoded)) + encoded
    code = hmac.digest(expand(prk, "header", 32), before, "sha256")
    secrets = ":".join(encode(part) for part in (code, *slots))
    return before.replace(SECRETS.encode(), secrets.encode()) + body + tags


def decrypt(file: bytes, user_key: bytes) -> dict:
    """Returns the data of each tensor by its name."""
    begin = 8 + struct.unpack("<Q", file[:8])[0]
    header = json.loads(file[8:begin])
    text = header.pop("__metadata__")["fst.encryption"]
    version, cipher, chunk_bytes, code, *slots = text.split(":")
    assert version == "1"
    key_id = expand(extract(b"", user_key), "id", 16)
    slot = next(slot for slot in map(decode, slots) if slot[96:112] == key_id)
    prk = extract(b"", unwrap(slot, user_key, cipher))
    before = file[:begin].replace(":".join((code, *slots)).encode(), SECRETS.encode())
    assert hmac.compare_digest(hmac.digest(expand(prk, "header", 32), before, "sha256"), decode(code))
    aead, tags, number = CIPHERS[cipher](expand(prk, f"data {cipher}", 32)), header.pop(TAGS), 0
    codes = file[begin + tags["data_offsets"][0] :]
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (begin + offset for offset in entry["data_offsets"])
        tensors[name] = b""
        for at in range(first, last, int(chunk_bytes)):
            sealed = file[at : min(at + int(chunk_bytes), last)] + codes[16 * number : 16 * number + 16]
            tensors[name] += aead.decrypt(nonce(number), sealed, b"")
            number += 1
    assert 16 * number == len(codes)
    return tensors


def numbers(seed: str, count: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(count)


def make() -> None:
    tensors = {
        "scale": ("F32", [3], numbers("scale", 12)),
        "empty": ("F32", [0, 4], b""),
        "weight": ("BF16", [65, 64], numbers("weight", 2 * 65 * 64)),
        "chunk": ("U8", [4096], numbers("chunk", 4096)),
    }
    key, passphrase, argon = numbers("key", 32), "open sesame", (2, 64 << 10, numbers("argon", 16))
    vectors = []
    for cipher in CIPHERS:
        file_key = numbers(f"file {cipher}", 32)
        slots = [
            wrap(file_key, key, cipher, numbers("salt 0", 32), label="vault"),
            wrap(file_key, derive(passphrase.encode(), *argon), cipher, numbers("salt 1", 32), argon=argon),
        ]
        name = f"{cipher}.safetensors"
        file = encrypt(tensors, {"format": "pt"}, file_key, cipher, 4096, slots)
        (HERE / name).write_bytes(file)
        digests = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in tensors.items()}
        assert {name: hashlib.sha256(data).hexdigest() for name, data in decrypt(file, key).items()} == digests
        vectors.append({"file": name, "key": key.hex(), "passphrase": passphrase, "tensors": digests})
    (HERE / "vectors.json").write_text(json.dumps(vectors, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make()
    else:
        for name, data in decrypt(Path(sys.argv[2]).read_bytes(), bytes.fromhex(sys.argv[3])).items():
            print(hashlib.sha256(data).hexdigest(), name)
