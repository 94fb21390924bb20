"""`fst sign` and `fst verify --signature`."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def payload_of(signature: Path) -> dict:
    from base64 import b64decode

    return json.loads(b64decode(json.loads(signature.read_text())["dsseEnvelope"]["payload"]))


@pytest.mark.parametrize("options", [[], ["--digests", "blake3"], ["--digests", "blake2b", "--shard-size", "1kB"]])
def test_signed_models_are_verified(command, model, options):
    done = command("sign", "model", "--private-key", "key.pem", *options)
    assert (done.returncode, done.stdout) == (0, "signed model in model/model.sig\n")
    for arguments in ([], ["model"], [model]):
        done = command("verify", "--signature", "model/model.sig", "--public-key", "key.pub", *arguments)
        assert done.returncode == 0, done
        assert "3 files as signed in model/model.sig" in done.stdout
    # The second signature replaces the first, which it does not cover.
    assert command("sign", "model", "--private-key", "key.pem", *options).returncode == 0
    assert command("verify", "--signature", "model/model.sig", "--public-key", "key.pub").returncode == 0


@pytest.mark.parametrize("curve", ["prime256v1", "secp384r1", "secp521r1"])
@pytest.mark.parametrize("form", ["SEC 1", "PKCS #8"])
def test_keys_in_both_formats(command, model, curve, form):
    key, public = model.parent / "key.pem", model.parent / "key.pub"
    if form == "SEC 1":
        # Without -noout, the file begins with the parameters of the curve.
        openssl("ecparam", "-name", curve, "-genkey", "-out", key)
    else:
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", f"ec_paramgen_curve:{curve}", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    assert command("sign", "model", "--private-key", key).returncode == 0
    assert command("verify", "--signature", "model/model.sig", "--public-key", public).returncode == 0


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Leaves room for 160 more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 160, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_models_may_have_more_files_than_a_process_may_open(command, model):
    lines = []
    for number in range(200):
        content = f"file {number}".encode()
        (model / f"{number:03}.txt").write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {number:03}.txt\n")
    manifest = model.parent / "sums.txt"
    manifest.write_text("".join(lines))
    done = command("sign", "model", "--private-key", "key.pem")
    assert done.returncode == 0, done
    signed = ["verify", "--signature", "model/model.sig", "--public-key", "key.pub"]
    listed = ["verify", "--manifest", "sums.txt", "model"]
    for arguments, count in ((signed, 203), (listed, 200)):
        done = command(*arguments)
        assert done.returncode == 0, done
        assert f"{count} files" in done.stdout
    # Differences in files that are not open at the same time.
    for name in ("001.txt", "199.txt"):
        (model / name).write_bytes(b"FILE xyz"[: (model / name).stat().st_size])
    for arguments in (signed, listed):
        done = command(*arguments)
        assert done.returncode == 1
        assert "001.txt" in done.stdout
        assert "1 more digest" in done.stdout
    # No file is hashed if one is missing.
    (model / "199.txt").unlink()
    for arguments in (signed, listed):
        done = command(*arguments)
        assert done.returncode == 1
        assert "199.txt" in done.stdout


@pytest.mark.parametrize("shard_bytes", [None, 1000])
@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
def test_model_signing_verifies_what_is_signed(command, model, algorithm, shard_bytes):
    pytest.importorskip("model_signing")
    from model_signing import hashing, verifying

    shards = [] if shard_bytes is None else ["--shard-size", str(shard_bytes)]
    assert command("sign", "model", "--private-key", "key.pem", "--digests", algorithm, *shards).returncode == 0

    def verify():
        config = verifying.Config().use_elliptic_key_verifier(public_key=model.parent / "key.pub")
        if algorithm == "blake2b":
            # It calls this algorithm "blake2" in its interface, and does not know the name that it writes itself.
            options = {"hashing_algorithm": "blake2", "ignore_paths": [model / "model.sig"]}
            hashed = hashing.Config()
            if shard_bytes is None:
                hashed.use_file_serialization(**options)
            else:
                hashed.use_shard_serialization(shard_size=shard_bytes, **options)
            config.set_hashing_config(hashed)
        config.verify(model, model / "model.sig")

    if algorithm == "blake2b":
        plain = verifying.Config().use_elliptic_key_verifier(public_key=model.parent / "key.pub")
        with pytest.raises(ValueError, match="blake2b"):
            plain.verify(model, model / "model.sig")
    verify()
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(ValueError, match=r"mismatch|Mismatch"):
        verify()


@pytest.mark.parametrize("algorithm", ["sha256", "blake2", "blake3"])
@pytest.mark.parametrize("method", ["use_file_serialization", "use_shard_serialization"])
def test_what_model_signing_has_signed_is_verified(command, model, algorithm, method):
    pytest.importorskip("model_signing")
    from model_signing import hashing, signing

    hashed = getattr(hashing.Config(), method)(hashing_algorithm=algorithm)
    config = signing.Config().set_hashing_config(hashed.set_ignored_paths(paths=[model / "model.sig"]))
    config.use_elliptic_key_signer(private_key=model.parent / "key.pem").sign(model, model / "model.sig")
    verify = ("verify", "--signature", "model/model.sig", "--public-key", "key.pub")
    assert command(*verify).returncode == 0
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert command(*verify).returncode == 1


def test_json(command, model):
    shown = json.loads(command("sign", "model", "--private-key", "key.pem", "--json").stdout)
    assert shown == {"path": "model", "signature": "model/model.sig"}
    assert (model / "model.sig").is_file()


def test_what_is_signed(command, model):
    (model / ".git").mkdir()
    (model / ".git" / "HEAD").write_text("x")
    (model / "part" / "notes.txt").write_text("x")
    done = command("sign", "model", "--private-key", "key.pem", "--signature", "x.sig", "--ignore", "part/notes.txt")
    assert done.returncode == 0
    statement = payload_of(model.parent / "x.sig")
    names = [resource["name"] for resource in statement["predicate"]["resources"]]
    assert names == ["config.json", "model.safetensors", "part/adapter.safetensors"]
    assert statement["subject"][0]["name"] == "model"
    assert statement["predicate"]["serialization"]["ignore_paths"] == [
        ".git", ".gitattributes", ".github", ".gitignore", "part/notes.txt",
    ]  # fmt: skip
    assert command("verify", "--signature", "x.sig", "--public-key", "key.pub", "model").returncode == 0


def test_one_file(command, model):
    assert command("sign", "model/config.json", "--private-key", "key.pem").returncode == 0
    verify = ["verify", "--signature", "model/model.sig", "--public-key", "key.pub"]
    assert command(*verify, "model/config.json").returncode == 0
    done = command(*verify, "model/model.safetensors")
    assert done.returncode == 1
    assert "WRONG" in done.stdout
    assert "the signature states sha256:" in done.stdout


def test_what_is_wrong(command, model):
    assert command("sign", "model", "--private-key", "key.pem").returncode == 0
    verify = ["verify", "--signature", "model/model.sig", "--public-key", "key.pub"]
    (model / "config.json").write_text("{}")
    assert "config.json: byte 0: the digest of the file is" in command(*verify).stdout
    shutil.copy(FIXTURES / "model" / "config.json", model)
    (model / "modeling.py").write_text("x")
    done = command(*verify)
    assert (done.returncode, "does not name these files: modeling.py" in done.stdout) == (1, True)
    assert command(*verify, "--ignore", "modeling.py").returncode == 0
    assert command(*verify, "--ignore-unsigned").returncode == 0
    os.replace(model / "config.json", model / "modeling.py")
    assert "config.json: cannot open" in command(*verify, "--ignore-unsigned").stdout
    os.symlink("modeling.py", model / "config.json")
    assert "symbolic link" in command(*verify, "--ignore-unsigned").stdout
    assert command(*verify, "--ignore-unsigned", "--allow-symlinks").returncode == 0


def test_symbolic_links_are_signed_if_allowed(command, model):
    os.symlink("config.json", model / "link.json")
    done = command("sign", "model", "--private-key", "key.pem")
    assert done.returncode == 1
    assert "link.json: the file is a symbolic link" in done.stderr
    assert not (model / "model.sig").exists()
    assert command("sign", "model", "--private-key", "key.pem", "--allow-symlinks").returncode == 0
    verify = ["verify", "--signature", "model/model.sig", "--public-key", "key.pub"]
    # Those who verify decide for themselves.
    assert "link.json: the file is a symbolic link" in command(*verify).stdout
    assert "4 files" in command(*verify, "--allow-symlinks").stdout


def test_certificates(command, model):
    directory = model.parent
    (directory / "usage").write_text("keyUsage=critical,digitalSignature\nbasicConstraints=critical,CA:FALSE\n")
    root = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-521", "-nodes", "-subj", "/CN=root"]
    openssl("req", *root, "-keyout", directory / "ca.key", "-out", directory / "ca.pem", "-days", 9)
    openssl("req", "-new", "-key", directory / "key.pem", "-subj", "/CN=signer", "-out", directory / "csr")
    issue = ["-CA", directory / "ca.pem", "-CAkey", directory / "ca.key", "-extfile", directory / "usage", "-sha512"]
    openssl("x509", "-req", "-in", directory / "csr", *issue, "-out", directory / "cert.pem", "-days", 9)
    certificates = ["--signing-certificate", "cert.pem", "--certificate-chain", "ca.pem"]
    assert command("sign", "model", "--private-key", "key.pem", *certificates).returncode == 0
    done = command("verify", "--signature", "model/model.sig", "--certificate-chain", "ca.pem")
    assert done.returncode == 0, done
    done = command("verify", "--signature", "model/model.sig", "--certificate-chain", FIXTURES / "older" / "root.pem")
    assert "does not lead to a trusted root certificate" in done.stdout
    done = command("sign", "model", "--private-key", "ca.key", *certificates)
    assert "belongs to another key" in done.stderr
    done = command("sign", "model", "--private-key", "key.pem", *certificates[2:])
    assert "needs the signing certificate" in done.stderr
    done = command("verify", "--signature", "model/model.sig", "--public-key", "key.pub")
    assert "verify it with the root certificate" in done.stdout


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
        done = command("sign", "model", "--private-key", key)
        assert done.returncode == 1
        assert error in done.stderr
        assert not any(line[8:30] in done.stderr + done.stdout for line in secret[1:-1])


def test_arguments(command, model):
    assert "needs one of" in command("verify", "--signature", "x.sig").stdout
    assert "exclude each other" in command("verify", "--signature", "x.sig", "--manifest", "y").stderr
