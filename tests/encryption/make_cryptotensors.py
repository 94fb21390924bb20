"""Makes the files of CryptoTensors beside this file, with its package: pip install cryptotensors==0.2.3 torch."""

import base64
import hashlib
import json
from pathlib import Path

import cryptotensors
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptotensors.torch import save_file

HERE = Path(__file__).parent


def numbers(seed: str, count: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(count)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def make() -> None:
    assert cryptotensors.__version__ == "0.2.3"
    private = numbers("signer", 32)
    public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    signer = {"kty": "okp", "alg": "ed25519", "kid": "signer", "x": encode(public), "d": encode(private)}
    tensors = {
        "scale": torch.frombuffer(bytearray(numbers("scale", 12)), dtype=torch.int32),
        "empty": torch.empty(0, 4),
        "weight": torch.frombuffer(bytearray(numbers("weight", 2 * 40 * 33)), dtype=torch.bfloat16).reshape(40, 33),
        "chunk": torch.frombuffer(bytearray(numbers("chunk", 1024)), dtype=torch.uint8),
    }
    vectors = []
    for version, algorithm, names in [
        ("1", "aes256gcm", None),
        ("2", "aes256gcm", None),
        ("2", "chacha20poly1305", ["weight", "empty"]),
    ]:
        key = {"kty": "oct", "alg": algorithm, "kid": "vault", "k": encode(numbers(f"key {algorithm}", 32))}
        config = {"enc_key": key, "sign_key": signer, "version": version, "chunk_size": 1024, "tensors": names}
        file = f"cryptotensors-{version}-{algorithm}.safetensors"
        save_file(tensors, HERE / file, {"format": "pt"}, {name: value for name, value in config.items() if value})
        digests = {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        vectors.append({"file": file, "keys": [key, signer], "tensors": digests})
    (HERE / "cryptotensors.json").write_text(json.dumps(vectors, indent=2) + "\n")


if __name__ == "__main__":
    make()
