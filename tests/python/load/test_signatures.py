"""Loads that verify a signature of OpenSSF Model Signing. tests/rust/signatures.rs tests what is in a statement."""

import json
import random
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fst
from fst.compat.tensorizer import TensorSerializer
from saved import damage, flip_bit
from suite import CHECKOUT, READERS

# Made with model-signing 1.1.1: see README.md there.
FIXTURES = CHECKOUT / "tests" / "signatures"
SIGNATURES = {
    name: fst.Signature(FIXTURES / f"{name}.sig", public_key=FIXTURES / f"{name[:4]}.pub")
    for name in (
        "p256-files-sha256",
        "p384-files-blake2",
        "p521-files-blake3",
        "p256-shards-sha256",
        "p384-shards-blake2",
    )
}
NAMES = ["embedding", "head", "norm"]
# test_integrity.py has all loads, which take a manifest in the same way.
LOADS = [fst.load_file, fst.safe_open, lambda path, verify: fst.verify(path, verify)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(FIXTURES / "model" / "model.safetensors", tmp_path))


@pytest.mark.parametrize(
    ("signature", "named_reader"),
    list(zip(SIGNATURES.values(), cycle(["default", *READERS]))),
    indirect=["named_reader"],
)
@pytest.mark.usefixtures("named_reader")
def test_loads_verify_a_signature(path, signature):
    assert fst.load_file(path, dtype=torch.float64, verify=signature).keys() == set(NAMES)
    damage(path, "norm")
    for load in LOADS:
        with pytest.raises(fst.IntegrityError, match=r"model.safetensors: .*byte \d+: .*the signature states"):
            load(path, verify=signature)


@pytest.mark.parametrize(("chunk_bytes", "reader"), list(zip(cycle(["4096", "8192"]), READERS)), indirect=["reader"])
@pytest.mark.usefixtures("reader")
def test_shards_end_anywhere_in_chunks(model, sign, chunk_bytes, monkeypatch):
    """Verifies a file whose shards are larger and smaller than chunks, and whose header fills several shards."""
    monkeypatch.setenv("FST_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setenv("FST_STAGING_BYTES", "16384")
    path = model / "model.safetensors"
    weights = {f"t{index:03}": torch.randn(17 * index) for index in range(60)}
    fst.save_file(weights, path)
    end = path.stat().st_size
    for size in (97, 4096, 5000, 30_000, end, end + 1):
        verify = sign(model, "--shard-size", size)
        for dtype in (None, torch.float64):
            tensors = fst.load_file(path, dtype=dtype, verify=verify)
            expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
            torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
            for position in (9, end // 2, end - 1):
                flip_bit(path, position)
                with pytest.raises((fst.IntegrityError, fst.SafetensorError)):
                    fst.load_file(path, dtype=dtype, verify=verify)
                flip_bit(path, position)


@pytest.mark.parametrize(("options", "reader"), [((), "pread"), (("--shard-size", 5000), "mmap")], indirect=["reader"])
@pytest.mark.usefixtures("reader")
def test_files_in_the_format_of_tensorizer(model, sign, options):
    path = model / "model.tensors"
    weights = {name: torch.randn(8, 4) for name in NAMES}
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(weights)
    signature = sign(model, *options)
    fst.verify(path, signature)
    torch.testing.assert_close(fst.load_file(path, verify=signature), weights, rtol=0, atol=0)
    content = path.read_bytes()
    # In the file's header, in a tensor's header, in data and at the end. tensorizer's own hashes are not compared here.
    for position in (20, content.index(b"norm") + 1, content.rindex(weights["norm"].numpy().tobytes()), -1):
        flip_bit(path, position)
        for load in LOADS:
            with pytest.raises((fst.IntegrityError, fst.SafetensorError)):
                load(path, verify=signature)
        flip_bit(path, position)


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_no_byte_is_read_twice(path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    for verify in (False, SIGNATURES["p256-files-sha256"], SIGNATURES["p256-shards-sha256"]):
        with fst.profile() as profile:
            fst.load_file(path, verify=verify)
        read = profile.summary().stages["read"].bytes
        assert read == 3 * 128
    assert profile.summary().stages["hash"].bytes == path.stat().st_size


def test_operators_take_the_request(path):
    @torch.jit.script
    def load(path: str, verify: str) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_file(path, verify=verify)

    request = {"path": str(FIXTURES / "p256-files-sha256.sig"), "public_key": str(FIXTURES / "p256.pub")}
    text = json.dumps({"signature": request})
    assert load(str(path), text).keys() == set(NAMES)
    damage(path, "norm")
    with pytest.raises(Exception, match="the signature states"):
        load(str(path), text)


def test_files_that_the_signature_does_not_name(path):
    signature = SIGNATURES["p256-files-sha256"]
    renamed = path.rename(path.with_name("renamed.safetensors"))
    with pytest.raises(fst.IntegrityError, match=r"renamed.safetensors: the signature has no digest of the file"):
        fst.load_file(renamed, verify=signature)
    # The name of a signature of one file does not count.
    only = fst.Signature(FIXTURES / "single-file.sig", public_key=FIXTURES / "p256.pub")
    assert fst.load_file(renamed, verify=only).keys() == set(NAMES)
    damage(renamed, "norm")
    with pytest.raises(fst.IntegrityError):
        fst.load_file(renamed, verify=only)


@pytest.mark.parametrize("signature", [SIGNATURES["p256-shards-sha256"], SIGNATURES["p521-files-blake3"]])
def test_files_in_directories(tmp_path, signature):
    part = shutil.copytree(FIXTURES / "model", tmp_path / "copy") / "part"
    assert fst.load_file(part / "adapter.safetensors", verify=signature).keys() == {"down"}
    assert fst.load_file(part, verify=signature).keys() == {"down"}
    shutil.copy(FIXTURES / "model" / "model.safetensors", part / "adapter.safetensors")
    with pytest.raises(fst.IntegrityError):
        fst.load_file(part, verify=signature)


CHAINS = json.loads((FIXTURES / "chains.json").read_text())
# Parts of the errors for chains that the reference refuses, too.
REFUSALS = {
    "issuer had expired": '"CN=signer" does not lead to a trusted root certificate: .*not valid at validation time',
    "path is too long": "path length constraint violated",
    "other root of that name": "signature does not match",
    "signer is for servers": "lacks the key usage",
    "issuer may not issue": "does not allow to issue certificates",
    "unknown critical extension": r"1\.2\.3\.4",
    "only the issuer is trusted": "none of the certificates is a root",
}


def test_chains_get_the_verdict_of_the_reference(path, tmp_path):
    verify = fst.Signature(tmp_path / "model.sig", certificate_chain=tmp_path / "ca.pem")
    assert len(CHAINS["chains"]) == 24
    for name, case in CHAINS["chains"].items():
        (tmp_path / "ca.pem").write_text(case["roots"])
        (tmp_path / "model.sig").write_text(json.dumps(bundle_of(case, CHAINS["payload"])))
        if case["reference"] == "verified":
            assert fst.load_file(path, verify=verify).keys() == set(NAMES), name
        else:
            with pytest.raises(ValueError, match=REFUSALS.get(name, "model.sig: the certificate of")):
                fst.load_file(path, verify=verify)


def test_a_chain_needs_a_trusted_root(path, tmp_path):
    (tmp_path / "model.sig").write_text(json.dumps(bundle_of(CHAINS["chains"]["p521"], CHAINS["payload"])))
    (tmp_path / "other.pem").write_text(CHAINS["chains"]["p384"]["roots"])
    other = fst.Signature(tmp_path / "model.sig", certificate_chain=[tmp_path / "other.pem"])
    with pytest.raises(fst.IntegrityError, match=r"model.sig: the certificate of \"CN=signer\" does not lead to"):
        fst.load_file(path, verify=other)
    # A root that is not trusted does not become so by being in the signature.
    case = CHAINS["chains"]["p521"]
    root = case["roots"].replace("\n", "").removeprefix("-----BEGIN CERTIFICATE-----").partition("-----END")[0]
    chain = bundle_of(case | {"chain": [*case["chain"], root]}, CHAINS["payload"])
    (tmp_path / "model.sig").write_text(json.dumps(chain))
    with pytest.raises(fst.IntegrityError, match="does not lead to a trusted root certificate"):
        fst.load_file(path, verify=other)


@pytest.mark.parametrize("version", ["v0.2.0", "v0.3.1"])
def test_older_signatures_with_certificates(path, version):
    root = FIXTURES / "older" / "root.pem"
    verify = fst.Signature(FIXTURES / "older" / f"{version}-certificate.sig", certificate_chain=root)
    assert fst.load_file(path, verify=verify).keys() == set(NAMES)
    damage(path, "norm")
    with pytest.raises(fst.IntegrityError, match="the signature states"):
        fst.load_file(path, verify=verify)


def test_a_key_that_the_core_does_not_know(path, tmp_path):
    verify = SIGNATURES["p521-files-blake3"]
    bundle = json.loads(verify.path.read_text())
    target = tmp_path / "model.sig"
    changed = fst.Signature(target, public_key=verify.public_key)

    def fails(match: str) -> None:
        target.write_text(json.dumps(bundle))
        with pytest.raises(fst.SafetensorError, match=rf"model.sig: .*{match}"):
            fst.load_file(path, verify=changed)

    bundle["verificationMaterial"]["publicKey"]["hint"] = "00"
    fails("made with another key")
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    target.write_text(json.dumps(bundle))
    assert fst.load_file(path, verify=changed).keys() == set(NAMES)
    payload = b64decode(bundle["dsseEnvelope"]["payload"])
    bundle["dsseEnvelope"]["payload"] = b64encode(payload.replace(b"norm", b"mean") + b" ").decode()
    fails("not valid for its content")
    bundle["dsseEnvelope"]["payloadType"] = "x"
    fails("cannot be read: payloadType is")
    compressed = tmp_path / "compressed.pub"
    openssl("ec", "-pubin", "-in", FIXTURES / "p256.pub", "-conv_form", "compressed", "-out", compressed)
    verify = fst.Signature(SIGNATURES["p256-files-sha256"].path, public_key=compressed)
    assert fst.load_file(path, verify=verify).keys() == set(NAMES)


@pytest.mark.parametrize(
    ("package", "trust"),
    [
        ("cryptography", {"public_key": FIXTURES / "p521.pub"}),
        ("cryptography", {"certificate_chain": FIXTURES / "older" / "root.pem"}),
        ("sigstore", {"identity": "signer", "issuer": "issuer"}),
    ],
)
def test_signatures_without_packages(path, package, trust, monkeypatch):
    monkeypatch.delitem(sys.modules, "fst._signatures.bundle", raising=False)
    for name in ("cryptography", "sigstore.errors"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        fst.load_file(path, verify=fst.Signature("model.sig", **trust))
    assert fst.load_file(path, verify=SIGNATURES["p256-files-sha256"]).keys() == set(NAMES)


def bundle_of(case, payload):
    certificates = [{"rawBytes": der} for der in case["chain"]]
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"x509CertificateChain": {"certificates": certificates}},
        "dsseEnvelope": {
            "payload": payload,
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": case["sig"]}],
        },
    }


def test_errors_name_the_file_and_the_remedy(path, tmp_path):
    keyless = fst.Signature(FIXTURES / "older" / "keyless.sig", public_key=FIXTURES / "p256.pub")
    with pytest.raises(fst.IntegrityError, match=r"keyless.sig: the signature is keyless.*the identity and the issuer"):
        fst.load_file(path, verify=keyless)
    ed25519 = tmp_path / "ed25519.pub"
    openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "ed25519.pem")
    openssl("pkey", "-in", tmp_path / "ed25519.pem", "-pubout", "-out", ed25519)
    large = tmp_path / "large.pub"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    for key, error in {
        ed25519: "ed25519.pub: the public key is not a key of ECDSA on P-256, P-384 or P-521",
        path: "model.safetensors: the file has no public key in PEM",
        large: "large.pub: expected at most 67108864 bytes, not 67108865",
        tmp_path / "none.pub": "none.pub",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            fst.load_file(path, verify=fst.Signature(keyless.path, public_key=key))
    with pytest.raises(ValueError, match=r"model.safetensors: the signature cannot be read: it is no bundle"):
        fst.load_file(path, verify=fst.Signature(path, public_key=FIXTURES / "p256.pub"))


def test_arguments_of_a_signature(path):
    for arguments in ({}, {"public_key": "key.pub", "certificate_chain": "ca.pem"}, {"certificate_chain": []}):
        with pytest.raises(ValueError, match="needs one of public_key, certificate_chain and identity"):
            fst.Signature("model.sig", **arguments)
    with pytest.raises(ValueError, match="go together"):
        fst.Signature("model.sig", identity="someone@example.com")
    with pytest.raises(TypeError, match="path"):
        fst.load_file(path, verify=fst.Signature(3, public_key="key.pub"))


def test_mutated_signatures_never_verify_other_data(path, tmp_path):
    """The core verifies signatures of a public key: see mutated_statements_are_parsed_or_refused in tests/rust."""
    case = CHAINS["chains"]["p256"]
    text = json.dumps(bundle_of(case, CHAINS["payload"])).encode()
    (tmp_path / "ca.pem").write_text(case["roots"])
    target = tmp_path / "model.sig"
    verify = fst.Signature(target, certificate_chain=tmp_path / "ca.pem")
    target.write_bytes(text)
    fst.verify(path, verify)
    damage(path, "norm")
    numbers = random.Random(8)
    for _ in range(2000):
        mutated = bytearray(text)
        for _ in range(numbers.choice([1, 1, 1, 4])):
            at = numbers.randrange(len(mutated))
            kind = numbers.randrange(4)
            if kind == 0:
                mutated[at] ^= 1 << numbers.randrange(8)
            elif kind == 1:
                mutated[at] = numbers.randrange(256)
            elif kind == 2:
                del mutated[at : at + numbers.randrange(1, 50)]
            else:
                mutated[at:at] = mutated[numbers.randrange(len(mutated)) :][: numbers.randrange(1, 50)]
        target.write_bytes(mutated)
        # The exception is a ValueError, with the path of the signature or of the damaged file.
        with pytest.raises(fst.SafetensorError, match=r"model\.s"):
            fst.verify(path, verify)


@pytest.fixture
def sigstore(monkeypatch):
    """Replaces the package sigstore: a signature is valid for the identity `signer` and the issuer `issuer`."""

    class Error(Exception):
        pass

    class Verifier:
        @classmethod
        def production(cls, *, offline):
            assert offline
            return cls()

        def verify_dsse(self, bundle, policy):
            if policy != ("signer", "issuer"):
                raise Error("another identity")
            return "application/vnd.in-toto+json", b64decode(bundle["dsseEnvelope"]["payload"])

    modules = {
        "sigstore.errors": {"Error": Error},
        "sigstore.models": {"Bundle": SimpleNamespace(from_json=json.loads), "ClientTrustConfig": None},
        "sigstore.verify": {
            "Verifier": Verifier,
            "policy": SimpleNamespace(Identity=lambda identity, issuer: (identity, issuer)),
        },
    }
    monkeypatch.setitem(sys.modules, "sigstore", ModuleType("sigstore"))
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def test_keyless_signatures_of_an_identity(path, sigstore):
    file = SIGNATURES["p256-shards-sha256"].path
    verify = fst.Signature(file, identity="signer", issuer="issuer")
    assert fst.load_file(path, verify=verify).keys() == set(NAMES)
    with pytest.raises(fst.IntegrityError, match=r"p256-shards-sha256.sig: the signature of other .* another identity"):
        fst.load_file(path, verify=fst.Signature(file, identity="other", issuer="issuer"))
    damage(path, "norm")
    with pytest.raises(fst.IntegrityError, match="the signature states"):
        fst.load_file(path, verify=verify)


def refuse_sharded(path, verify):
    try:
        fst.load_sharded(path, {"*": None}, verify=verify)
    except (fst.IntegrityError, fst.RankError) as error:
        return type(error).__name__
    return "loaded"


def test_ranks_share_the_verdict(path, ranks):
    group = ranks(2)
    verify = SIGNATURES["p256-shards-sha256"]
    assert group.run(refuse_sharded, str(path), verify) == ["loaded", "loaded"]
    damage(path, "norm")
    assert sorted(group.run(refuse_sharded, str(path), verify)) == ["IntegrityError", "RankError"]
