"""Files of CryptoTensors, written from the description in docs/encryption.md, also with faults."""

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from safetensors.torch import save
from torch import Tensor

CIPHERS = {"aes256gcm": AESGCM, "chacha20poly1305": ChaCha20Poly1305}
NO_POLICY = "package model\nallow = true"
CHUNK_BYTES = 2 << 20


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    return base64.b64decode(text)


@dataclass
class Keys:
    """Secret key and signer of files."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    signer: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    algorithm: str = "aes256gcm"

    def jwk(self) -> dict[str, str]:
        """Returns the secret key as CryptoTensors takes it."""
        return {"kty": "oct", "alg": self.algorithm, "kid": "vault", "k": encode(self.secret)}

    def signer_jwk(self) -> dict[str, str]:
        """Returns both keys of the signer as CryptoTensors takes them."""
        public, private = self.signer.public_key().public_bytes_raw(), self.signer.private_bytes_raw()
        return {"kty": "okp", "alg": "ed25519", "kid": "signer", "x": encode(public), "d": encode(private)}

    def write(self, path: Path) -> Path:
        """Writes both as a JWK Set, without the private key."""
        signer = self.signer_jwk()
        del signer["d"]
        path.write_text(json.dumps({"keys": [self.jwk(), signer]}))
        return path


@dataclass
class File:
    """File whose header can be changed, and signed again.

    Attributes:
        crypto_keys: The metadata `__crypto_keys__`.
        encryption: The metadata `__encryption__`.
        policy: The metadata `__policy__`.
        metadata: All other metadata.
        tensors: The entries of the tensors.
        data: Their bytes, encrypted.
    """

    crypto_keys: dict[str, Any]
    encryption: dict[str, dict[str, str]]
    policy: dict[str, str]
    metadata: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    data: bytearray

    def signed(self) -> str:
        """Returns the header that is signed."""
        own = {"__crypto_keys__": self.crypto_keys, "__encryption__": self.encryption, "__policy__": self.policy}
        metadata = self.metadata | {key: json.dumps(value, separators=(",", ":")) for key, value in own.items()}
        header = {"__metadata__": dict(sorted(metadata.items()))} | self.tensors
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False)

    def content(self, keys: Keys) -> bytes:
        """Signs the header, and returns the file."""
        header = self.signed()
        signature = encode(keys.signer.sign(header.encode()))
        begin = '"__policy__":"' + json.dumps(json.dumps(self.policy, separators=(",", ":")))[1:]
        header = header.replace(begin, f'{begin},"__signature__":"{signature}"')
        encoded = header.encode()
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded + self.data


def encrypt(
    tensors: Mapping[str, Tensor],
    keys: Keys,
    *,
    version: str = "2",
    chunk_bytes: int = CHUNK_BYTES,
    names: list[str] | None = None,
) -> File:
    """Encrypts tensors, or those with some names."""
    plain = save(dict(tensors))
    begin = 8 + int.from_bytes(plain[:8], "little")
    entries = json.loads(plain[8:begin])
    entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
    data, encryption = bytearray(plain[begin:]), {}
    cipher = CIPHERS[keys.algorithm]
    for name, entry in entries.items():
        if names is not None and name not in names:
            continue
        key, key_iv, iv = secrets.token_bytes(32), secrets.token_bytes(12), secrets.token_bytes(8) + bytes(4)
        wrapped = cipher(keys.secret).encrypt(key_iv, key, b"")
        first, end = entry["data_offsets"]
        size = chunk_bytes if version == "2" else max(end - first, 1)
        tags = b""
        for number, at in enumerate(range(first, max(end, first + 1), size)):
            stop = min(at + size, end)
            nonce = iv[:8] + number.to_bytes(4, "big")
            sealed = cipher(key).encrypt(nonce, bytes(data[at:stop]), b"")
            data[at:stop], tags = sealed[:-16], tags + sealed[-16:]
        if version == "1" and first == end:
            iv = tags = b""
        fields = ("base_iv", "tags") if version == "2" else ("iv", "tag")
        wrapping = {"wrapped_key": wrapped[:-16], "key_iv": key_iv, "key_tag": wrapped[-16:]}
        parts = wrapping | dict(zip(fields, (iv, tags), strict=True))
        encryption[name] = {part: encode(value) for part, value in parts.items()}
    crypto_keys: dict[str, Any] = {
        "enc": {"alg": keys.algorithm, "kid": "vault", "kty": "oct"},
        "sign": {"alg": "ed25519", "kid": "signer", "kty": "okp"},
        "version": version,
    }
    if version == "2":
        crypto_keys = {"chunk_size": chunk_bytes} | crypto_keys
    policy = {"local": NO_POLICY, "remote": NO_POLICY}
    return File(crypto_keys, dict(sorted(encryption.items())), policy, {"format": "pt"}, entries, data)


def sample() -> dict[str, Tensor]:
    """Returns tensors of several dtypes and sizes: below, at and above the size of a chunk, and none."""
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.randn(1200, 1100, generator=generator),
        "chunk": torch.randint(256, (CHUNK_BYTES,), generator=generator, dtype=torch.uint8),
        "half": torch.randn(300, 200, generator=generator).bfloat16(),
        "float8": torch.randn(33, 3, generator=generator).to(torch.float8_e4m3fn),
        "bool": torch.arange(77) % 3 == 0,
        "complex": torch.randn(5, 2, generator=generator, dtype=torch.complex64),
        "ü ö": torch.arange(1001),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "none": torch.empty(0),
    }
