"""`fst sign` and `fst verify --signature`."""

import json
import os
import resource
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest

from saved import flip_bit
from suite import CHECKOUT

# Made with model-signing 1.1.1: see README.md there.
FIXTURES = CHECKOUT / "tests" / "signatures"


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model of the fixtures, and keys beside it."""
    openssl("ecparam", "-name", "secp384r1", "-genkey", "-noout", "-out", tmp_path / "key.pem")
    openssl("ec", "-in", tmp_path / "key.pem", "-pubout", "-out", tmp_path / "key.pub")
    return shutil.copytree(FIXTURES / "model", tmp_path / "model")


SIGN = ("sign", "model", "--private-key", "key.pem")
VERIFY = ("verify", "--signature", "model/model.sig", "--public-key", "key.pub")


@pytest.mark.parametrize("options", [[], ["--digests", "blake2b", "--shard-size", "1kB"]])
def test_signed_models_are_verified(command, model, options):
    done = command(*SIGN, *options)
    assert (done.returncode, done.stdout) == (0, "signed model in model/model.sig\n")
    for arguments in ([], ["model"], [model]):
        done = command(*VERIFY, *arguments)
        assert done.returncode == 0, done
        assert "3 files as signed in model/model.sig" in done.stdout
    # The second signature replaces the first, which it does not cover.
    shown = json.loads(command(*SIGN, *options, "--json").stdout)
    assert shown == {"path": "model", "signature": "model/model.sig"}
    assert command(*VERIFY).returncode == 0


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1", "secp521r1"])
def test_keys_in_both_formats(command, model, curve):
    key, public = model.parent / "key.pem", model.parent / "key.pub"
    for arguments in (
        ("genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{curve}"),
        # Without -noout, the file begins with the parameters of the curve.
        ("ecparam", "-name", curve, "-genkey"),
    ):
        openssl(*arguments, "-out", key)
        openssl("pkey", "-in", key, "-pubout", "-out", public)
        assert command(*SIGN).returncode == 0
        assert command(*VERIFY).returncode == 0


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Leaves room for 160 more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 160, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_models_may_have_more_files_than_a_process_may_open(command, model):
    for number in range(200):
        (model / f"{number:03}.txt").write_text(f"file {number}")
    done = command(*SIGN)
    assert done.returncode == 0, done
    done = command(*VERIFY)
    assert (done.returncode, "203 files" in done.stdout) == (0, True), done
    # Differences in files that are not open at the same time.
    for name in ("001.txt", "199.txt"):
        flip_bit(model / name, -1)
    done = command(*VERIFY)
    assert (done.returncode, "001.txt" in done.stdout, "1 more digest" in done.stdout) == (1, True, True), done


@pytest.mark.parametrize("shards", [[], ["--shard-size", "1000"]])
def test_model_signing_verifies_what_is_signed(command, model, shards):
    """It does not know the name of blake2b that it writes itself."""
    verifying = pytest.importorskip("model_signing.verifying")
    assert command(*SIGN, *shards).returncode == 0
    config = verifying.Config().use_elliptic_key_verifier(public_key=model.parent / "key.pub")
    config.verify(model, model / "model.sig")
    flip_bit(model / "model.safetensors", -1)
    with pytest.raises(ValueError, match=r"mismatch|Mismatch"):
        config.verify(model, model / "model.sig")


def test_what_is_signed(command, model):
    (model / ".git").mkdir()
    (model / ".git" / "HEAD").write_text("x")
    (model / "part" / "notes.txt").write_text("x")
    assert command(*SIGN, "--signature", "x.sig", "--ignore", "part/notes.txt").returncode == 0
    envelope = json.loads((model.parent / "x.sig").read_text())["dsseEnvelope"]
    statement = json.loads(b64decode(envelope["payload"]))
    names = [resource["name"] for resource in statement["predicate"]["resources"]]
    assert names == ["config.json", "model.safetensors", "part/adapter.safetensors"]
    assert statement["subject"][0]["name"] == "model"
    ignored = [".git", ".gitattributes", ".github", ".gitignore", "part/notes.txt"]
    assert statement["predicate"]["serialization"]["ignore_paths"] == ignored
    assert command("verify", "--signature", "x.sig", "--public-key", "key.pub", "model").returncode == 0


def test_one_file(command, model):
    assert command("sign", "model/config.json", "--private-key", "key.pem").returncode == 0
    assert command(*VERIFY, "model/config.json").returncode == 0
    done = command(*VERIFY, "model/model.safetensors")
    assert done.returncode == 1
    assert "WRONG" in done.stdout
    assert "the signature states sha256:" in done.stdout


def test_what_is_wrong(command, model):
    """tests/rust/signatures.rs has the faults. The options decide about them."""
    assert command(*SIGN).returncode == 0
    os.rename(model / "config.json", model / "modeling.py")
    os.symlink("modeling.py", model / "config.json")
    done = command(*VERIFY, "--allow-symlinks")
    assert (done.returncode, "does not name these files: modeling.py" in done.stdout) == (1, True)
    assert command(*VERIFY, "--allow-symlinks", "--ignore", "modeling.py").returncode == 0
    # Those who sign and those who verify decide for themselves.
    assert "config.json: the file is a symbolic link" in command(*VERIFY, "--ignore-unsigned").stdout
    assert command(*VERIFY, "--ignore-unsigned", "--allow-symlinks").returncode == 0
    done = command(*SIGN, "--signature", "new.sig")
    assert done.returncode == 1
    assert "config.json: the file is a symbolic link" in done.stderr
    assert not (model.parent / "new.sig").exists()
    assert command(*SIGN, "--allow-symlinks").returncode == 0
    assert "4 files" in command(*VERIFY, "--allow-symlinks").stdout


def test_certificates(command, model):
    directory = model.parent
    (directory / "usage").write_text("keyUsage=critical,digitalSignature\nbasicConstraints=critical,CA:FALSE\n")
    root = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-521", "-nodes", "-subj", "/CN=root"]
    openssl("req", *root, "-keyout", directory / "ca.key", "-out", directory / "ca.pem", "-days", 9)
    openssl("req", "-new", "-key", directory / "key.pem", "-subj", "/CN=signer", "-out", directory / "csr")
    issue = ["-CA", directory / "ca.pem", "-CAkey", directory / "ca.key", "-extfile", directory / "usage", "-sha512"]
    openssl("x509", "-req", "-in", directory / "csr", *issue, "-out", directory / "cert.pem", "-days", 9)
    certificates = ["--signing-certificate", "cert.pem", "--certificate-chain", "ca.pem"]
    assert command(*SIGN, *certificates).returncode == 0
    verify = ("verify", "--signature", "model/model.sig", "--certificate-chain")
    done = command(*verify, "ca.pem")
    assert done.returncode == 0, done
    other = FIXTURES / "older" / "root.pem"
    assert "does not lead to a trusted root certificate" in command(*verify, other).stdout
    assert "belongs to another key" in command(*SIGN[:-1], "ca.key", *certificates).stderr
    assert "needs the signing certificate" in command(*SIGN, *certificates[2:]).stderr
    assert "verify it with the root certificate" in command(*VERIFY).stdout


def test_private_keys_are_not_printed(command, model):
    secret = (model.parent / "key.pem").read_text().splitlines()
    openssl("ec", "-in", model.parent / "key.pem", "-aes128", "-passout", "pass:x", "-out", model.parent / "encrypted")
    (model.parent / "broken").write_text("\n".join([secret[0], secret[1][1:], *secret[2:]]))
    for key, error in {
        "encrypted": "encrypted: the private key is encrypted",
        "broken": "broken: the private key is not a key of ECDSA",
        "key.pub": "key.pub: the file has no private key",
        "none": "none: cannot open",
    }.items():
        done = command(*SIGN[:-1], key)
        assert done.returncode == 1
        assert error in done.stderr
        assert not any(line[8:30] in done.stderr + done.stdout for line in secret[1:-1])
