"""Fixtures for tests of loads."""

import subprocess

import pytest

import fst
from fst import cli
from rawfile import DTYPES, random_raw, write


@pytest.fixture
def every_dtype(tmp_path):
    """A file with one tensor per dtype of PyTorch, each larger than a small chunk, at any byte, and an empty one."""
    tensors = {name: random_raw(name, (3, 2500, 2)) for name in DTYPES} | {"empty": random_raw("F32", (0, 3))}
    return write(tmp_path / "dtypes.safetensors", tensors, align=1), tensors


@pytest.fixture
def named_reader(request, monkeypatch):
    """Runs a test with the reader that its parameter names, or with the default one."""
    if request.param != "default":
        monkeypatch.setenv("FST_READER", request.param)


@pytest.fixture
def sign(tmp_path):
    """Returns a function that signs a model with a new key."""

    def sign(model, *options):
        key, public_key, signature = (tmp_path / name for name in ("key.pem", "key.pub", "model.sig"))
        create = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key]
        subprocess.run(create, check=True)
        subprocess.run(["openssl", "ec", "-in", key, "-pubout", "-out", public_key], check=True, capture_output=True)
        with pytest.raises(SystemExit) as end:
            cli.main(["sign", *map(str, (model, "--private-key", key, "--signature", signature, *options))])
        assert end.value.code == 0
        return fst.Signature(signature, public_key=public_key)

    return sign
