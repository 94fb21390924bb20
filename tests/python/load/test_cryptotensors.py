"""Encrypted files of CryptoTensors: loads with a JWK Set, and what they refuse."""

import itertools
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import fst
import fst.torch as fst_torch
from cryptotensorsfile import CHUNK_BYTES, File, Keys, decode, encode, encrypt, sample
from fst import cli
from ranks import Ranks
from rawfile import assert_same
from suite import READERS

TENSORS = sample()
VECTORS = Path(__file__).parents[2] / "encryption"


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys()


@pytest.fixture
def key(keys: Keys, tmp_path: Path) -> fst.EncryptionKey:
    return fst.EncryptionKey.from_file(keys.write(tmp_path / "keys.json"))


@pytest.fixture
def path(keys: Keys, tmp_path: Path) -> Path:
    return write(encrypt(TENSORS, keys), keys, tmp_path)


@pytest.fixture
def registered(key: fst.EncryptionKey) -> Iterator[None]:
    key.register()
    yield
    key.unregister()


def write(file: File, keys: Keys, directory: Path) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(file.content(keys))
    return path


def small(keys: Keys, **options: Any) -> File:
    """Returns a file whose tensors have several chunks of 64 bytes, except "gain", which is as large as "bias"."""
    tensors = {"bias": torch.arange(40.0), "gain": torch.arange(40.0) + 1, "head": torch.arange(500.0)}
    return encrypt(tensors, keys, **{"chunk_bytes": 64} | options)


def assert_loaded(tensors: dict[str, Tensor]) -> None:
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert_same(tensor, TENSORS[name])


def swap(mapping: dict[str, Any], one: str, two: str) -> None:
    mapping[one], mapping[two] = mapping[two], mapping[one]


@pytest.mark.parametrize("algorithm", ["aes256gcm", "chacha20poly1305"])
@pytest.mark.parametrize("version", ["1", "2"])
def test_files_load(algorithm: str, version: str, tmp_path: Path) -> None:
    keys = Keys(algorithm=algorithm)
    key = fst.EncryptionKey.from_file(keys.write(tmp_path / "keys.json"))
    for chunk_bytes in (CHUNK_BYTES, 1000, 5_000_000):
        path = write(encrypt(TENSORS, keys, version=version, chunk_bytes=chunk_bytes), keys, tmp_path)
        assert_loaded(fst.load_file(path, encryption_key=key, verify=True))
        fst.verify(path, encryption_key=key)
    with fst.safe_open(path, encryption_key=key) as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("reader", READERS)
def test_readers_decrypt(path: Path, key: fst.EncryptionKey, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FST_READER", reader)
    monkeypatch.setenv("FST_CHUNK_BYTES", "61440")
    assert_loaded(fst.load_file(path, encryption_key=key))


@pytest.mark.parametrize(("version", "chunk_bytes"), [("1", 1), ("2", CHUNK_BYTES), ("2", 10_000)])
def test_slices_decrypt(keys: Keys, key: fst.EncryptionKey, tmp_path: Path, version: str, chunk_bytes: int) -> None:
    path = write(encrypt(TENSORS, keys, version=version, chunk_bytes=chunk_bytes), keys, tmp_path)
    with fst.safe_open(path, encryption_key=key) as file:
        for index in [slice(700, 710), (slice(None), slice(3, 1099)), (slice(1, None, 7), slice(900, 901))]:
            assert_same(file.get_slice("large")[index], TENSORS["large"][index])


def test_parts_of_the_data_that_are_not_encrypted_load(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    path = write(encrypt(TENSORS, keys, names=["half", "none"]), keys, tmp_path)
    assert_loaded(fst.load_file(path, encryption_key=key))
    with fst.safe_open(path, encryption_key=key) as file:
        assert_same(file.get_slice("large")[5:1100:3, 7:], TENSORS["large"][5:1100:3, 7:])
    # Nothing authenticates them.
    for load in (fst.verify, lambda path, **options: fst.load_file(path, verify=True, **options)):
        with pytest.raises(fst.IntegrityError, match=r'tensor "ü ö": byte .* is not encrypted'):
            load(path, encryption_key=key)


@pytest.mark.usefixtures("registered")
def test_every_entrance_decrypts_with_a_registered_key(path: Path) -> None:
    assert_loaded(torch.ops.fst.load_file(str(path)))
    assert_loaded(fst_torch.load_file(path))
    assert_loaded(dict(fst.stream(path)))
    out = torch.zeros(1200, 1100)
    fst.load_into(path, ["large"], [out])
    assert_same(out, TENSORS["large"])
    with fst.safe_open(path) as file:
        assert_same(file.get_tensor("half"), TENSORS["half"])
    module = torch.nn.Module()
    module.register_buffer("large", torch.zeros(1200, 1100))
    fst.load_module(module, path, strict=False)
    assert_same(module.large, TENSORS["large"])


def test_commands_take_the_key_of_the_environment(
    keys: Keys, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def output_of(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        output = "".join(capsys.readouterr())
        assert end.value.code == code, output
        return output

    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(keys.write(tmp_path / "keys.json")))
    assert "float8" in output_of("inspect", path)
    assert "authenticated" in output_of("verify", path)
    plain = tmp_path / "plain.safetensors"
    output_of("convert", path, plain)
    assert_loaded(fst.load_file(plain))
    assert fst.metadata(plain) == {"format": "pt"}
    write(encrypt(TENSORS, keys, names=["half"]), keys, tmp_path)
    assert "not encrypted" in output_of("verify", path, code=1)


def load_in_ranks(path: Path, keys: Path, strategy: Literal["own", "exchange"]) -> None:
    key = fst.EncryptionKey.from_file(keys)
    placements = {"large": Shard(0), "*": Replicate()}
    loaded = fst.load_sharded(path, placements, strategy=strategy, window_bytes=100_000, encryption_key=key)
    assert_same(loaded["large"], TENSORS["large"].chunk(dist.get_world_size())[dist.get_rank()])
    assert_same(loaded["chunk"], TENSORS["chunk"])


@pytest.mark.parametrize("strategy", ["own", "exchange"])
def test_ranks_load(ranks: Callable[[int], Ranks], keys: Keys, path: Path, tmp_path: Path, strategy: str) -> None:
    ranks(2).run(load_in_ranks, path, keys.write(tmp_path / "keys.json"), strategy)


@pytest.mark.parametrize("vector", json.loads((VECTORS / "cryptotensors.json").read_text()), ids=lambda it: it["file"])
def test_files_of_the_package_load(vector: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"keys": vector["keys"]}))
    key = fst.EncryptionKey.from_file(tmp_path / "keys.json")
    tensors = fst.load_file(VECTORS / vector["file"], encryption_key=key)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "scale": torch.int32,
        "empty": torch.float32,
        "weight": torch.bfloat16,
        "chunk": torch.uint8,
    }


def test_the_package_writes_what_loads_read(tmp_path: Path) -> None:
    pytest.importorskip("cryptotensors")
    from cryptotensors.torch import save_file

    for number, (algorithm, version, names) in enumerate(
        itertools.product(["aes256gcm", "chacha20poly1305"], ["1", "2"], [None, ["half", "large"]])
    ):
        keys = Keys(algorithm=algorithm)
        config = {"enc_key": keys.jwk(), "sign_key": keys.signer_jwk(), "version": version}
        path = tmp_path / f"{number}.safetensors"
        metadata = {"format": "pt", "Quoted": 'a "b" \\ \n ü'}
        save_file(TENSORS, path, metadata, config | ({} if names is None else {"tensors": names}))
        key = fst.EncryptionKey.from_file(keys.write(tmp_path / "keys.json"))
        assert_loaded(fst.load_file(path, encryption_key=key))
        with fst.safe_open(path, encryption_key=key) as file:
            assert file.metadata() == metadata


def test_the_package_reads_what_this_writer_writes(keys: Keys, tmp_path: Path) -> None:
    cryptotensors = pytest.importorskip("cryptotensors")
    config = {"enc_key": keys.jwk(), "sign_key": keys.signer_jwk()}
    # Its reader does not know the order of several tensors without bytes.
    tensors = {name: TENSORS[name] for name in ("large", "half", "ü ö", "empty")}
    for version in ("1", "2"):
        path = write(encrypt(tensors, keys, version=version, chunk_bytes=100_000), keys, tmp_path)
        with cryptotensors.safe_open(path, framework="pt", config=config) as file:
            for name in ("large", "half", "ü ö"):
                assert_same(file.get_tensor(name), tensors[name])


def test_changed_data_are_an_integrity_error(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    for name, byte in [("bias", 0), ("bias", 159), ("head", 1000)]:
        file = small(keys)
        file.data[file.tensors[name]["data_offsets"][0] + byte] ^= 1
        path = write(file, keys, tmp_path)
        with pytest.raises(fst.IntegrityError, match=f'tensor "{name}": byte .* chunk {byte // 64},'):
            fst.load_file(path, encryption_key=key)
        with pytest.raises(fst.IntegrityError, match=f'tensor "{name}": byte'):
            fst.verify(path, encryption_key=key)


def exchange_data(file: File, begin: int, other: int, count: int) -> None:
    data = bytes(file.data)
    file.data[begin : begin + count] = data[other : other + count]
    file.data[other : other + count] = data[begin : begin + count]


def exchange_tensors(file: File) -> None:
    exchange_data(file, file.tensors["bias"]["data_offsets"][0], file.tensors["gain"]["data_offsets"][0], 160)


def exchange_chunks(file: File) -> None:
    begin = file.tensors["head"]["data_offsets"][0]
    exchange_data(file, begin, begin + 64, 64)


def exchange_chunks_and_codes(file: File) -> None:
    exchange_chunks(file)
    tags = decode(file.encryption["head"]["tags"])
    file.encryption["head"]["tags"] = encode(tags[16:32] + tags[:16] + tags[32:])


def exchange_wrapped_keys(file: File) -> None:
    for field in ("wrapped_key", "key_iv", "key_tag"):
        one, two = file.encryption["bias"], file.encryption["gain"]
        one[field], two[field] = two[field], one[field]


def take_another_file(file: File) -> None:
    other = small(Keys(secret=bytes(32)))
    file.data[:] = other.data


@pytest.mark.parametrize(
    "change", [exchange_tensors, exchange_chunks, exchange_chunks_and_codes, exchange_wrapped_keys, take_another_file]
)
def test_exchanged_parts_are_an_integrity_error_even_if_signed(
    keys: Keys, key: fst.EncryptionKey, tmp_path: Path, change: Callable[[File], None]
) -> None:
    file = small(keys)
    change(file)
    with pytest.raises(fst.IntegrityError, match=r'tensor "(bias|gain|head)": byte .* chunk'):
        fst.load_file(write(file, keys, tmp_path), encryption_key=key)


def rename(file: File) -> None:
    swap(file.tensors, "bias", "gain")
    swap(file.encryption, "bias", "gain")


def change_shape(file: File) -> None:
    file.tensors["bias"]["shape"] = [20, 2]


def change_dtype(file: File) -> None:
    file.tensors["bias"]["dtype"] = "I32"


def change_metadata(file: File) -> None:
    file.metadata["format"] = "tf"


def leave_unencrypted(file: File) -> None:
    del file.encryption["bias"]


def downgrade(file: File) -> None:
    file.crypto_keys["version"] = "1"


@pytest.mark.parametrize(
    "change",
    [rename, change_shape, change_dtype, change_metadata, leave_unencrypted, downgrade, exchange_wrapped_keys],
)
def test_changed_headers_are_an_integrity_error(
    keys: Keys, key: fst.EncryptionKey, tmp_path: Path, change: Callable[[File], None]
) -> None:
    file = small(keys)
    signed = file.content(keys)
    start = signed.index(b'"__signature__":"') + 17
    signature = signed[start : start + 88]
    change(file)
    changed = file.content(keys)
    start = changed.index(b'"__signature__":"') + 17
    path = tmp_path / "model.safetensors"
    path.write_bytes(changed[:start] + signature + changed[start + 88 :])
    with pytest.raises(fst.IntegrityError, match=r'no public key that was given has signed the header.* "signer"'):
        fst.load_file(path, encryption_key=key)


def set_field(field: str, value: str) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.encryption["head"][field] = value

    return change


def drop_field(field: str) -> Callable[[File], None]:
    return lambda file: file.encryption["head"].pop(field) and None


def set_key_field(field: str, value: Any) -> Callable[[File], None]:
    return lambda file: file.crypto_keys.update({field: value})


def clear_encryption(file: File) -> None:
    file.encryption.clear()


def encrypt_nothing_known(file: File) -> None:
    file.encryption["unknown"] = file.encryption["head"]


def truncate_tags(file: File) -> None:
    file.encryption["head"]["tags"] = encode(decode(file.encryption["head"]["tags"])[:-16])


def lengthen_tags(file: File) -> None:
    file.encryption["head"]["tags"] = encode(decode(file.encryption["head"]["tags"]) + bytes(16))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (truncate_tags, 'tensor "head".*each chunk'),
        (lengthen_tags, 'tensor "head".*each chunk'),
        (set_field("tags", "AAAA"), 'tensor "head".*each chunk'),
        (set_field("tags", "?"), 'tensor "head".*codes'),
        (set_field("base_iv", encode(bytes(11))), 'tensor "head".*nonce'),
        # The counter would begin again.
        (set_field("base_iv", encode(b"\xff" * 12)), 'tensor "head".*nonce'),
        (set_field("key_iv", encode(bytes(13))), 'tensor "head".*wrapped key'),
        (set_field("key_tag", encode(bytes(15))), 'tensor "head".*wrapped key'),
        (set_field("wrapped_key", encode(bytes(31))), 'tensor "head".*wrapped key'),
        (drop_field("tags"), 'tensor "head".*missing'),
        (drop_field("base_iv"), 'tensor "head".*missing'),
        (drop_field("key_tag"), "__encryption__.*missing"),
        (clear_encryption, "no tensor is encrypted"),
        (encrypt_nothing_known, "unknown.*lacks"),
        (set_key_field("version", "3"), 'version "3" is unknown'),
        (set_key_field("version", 2), "__crypto_keys__.*another type"),
        (set_key_field("chunk_size", 0), "each chunk"),
        (set_key_field("chunk_size", -1), "__crypto_keys__.*another type"),
        (set_key_field("chunk_size", 1), "each chunk"),
        (set_key_field("chunk_size", 2**64 - 1), "each chunk"),
        (set_key_field("enc", {"kid": "vault"}), "__crypto_keys__.*missing"),
    ],
)
def test_malformed_headers_are_refused_even_if_signed(
    keys: Keys, key: fst.EncryptionKey, tmp_path: Path, change: Callable[[File], None], text: str
) -> None:
    file = small(keys)
    change(file)
    with pytest.raises(fst.SafetensorError, match=text):
        fst.load_file(write(file, keys, tmp_path), encryption_key=key)


def test_policies_are_refused(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    for rule in ("local", "remote"):
        file = small(keys)
        file.policy[rule] = "package model\nallow = false"
        with pytest.raises(ValueError, match=r"model\.safetensors: .*access policy"):
            fst.load_file(write(file, keys, tmp_path), encryption_key=key)


def test_other_algorithms_are_refused(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    file = small(keys)
    file.crypto_keys["enc"]["alg"] = "aes128gcm"
    with pytest.raises(ValueError, match=r'"aes128gcm".* fst has aes256gcm'):
        fst.load_file(write(file, keys, tmp_path), encryption_key=key)


def test_half_of_the_metadata_is_refused(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    content = small(keys).content(keys)
    path = tmp_path / "model.safetensors"
    for name, text in {
        "__crypto_keys__": "__crypto_keys__",
        "__encryption__": "signed the header",
        "__policy__": "signed the header",
        "__signature__": "__signature__",
    }.items():
        path.write_bytes(content.replace(f'"{name}"'.encode(), f'"{name.replace("_", "-")}"'.encode()))
        with pytest.raises(fst.SafetensorError, match=text):
            fst.load_file(path, encryption_key=key)
        with pytest.raises(ValueError, match="encrypted by CryptoTensors"):
            fst.load_file(path)


def test_a_signature_in_another_place_is_refused(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    content = small(keys).content(keys)
    start = content.index(b',"__signature__":"')
    field = content[start : start + 18 + 88 + 1]
    path = tmp_path / "model.safetensors"
    # An escape, a space, and a second entry that is not one of the metadata.
    for changed in (
        content.replace(b"__signature__", b"\\u005f_signature__"),
        content.replace(b'"__signature__":', b'"__signature__": '),
        content.replace(b'"dtype":"F32"', b'"dtype":"F32"' + field, 1),
    ):
        begin = 8 + int.from_bytes(content[:8], "little")
        added = len(changed) - len(content)
        path.write_bytes((begin - 8 + added).to_bytes(8, "little") + changed[8:])
        with pytest.raises(fst.SafetensorError, match="not where it is written"):
            fst.load_file(path, encryption_key=key)


def test_the_signer_is_one_that_the_caller_trusts(keys: Keys, path: Path, tmp_path: Path) -> None:
    stranger = Keys(secret=keys.secret)
    key = fst.EncryptionKey.from_file(stranger.write(tmp_path / "stranger.json"))
    with pytest.raises(fst.IntegrityError, match="no public key"):
        fst.load_file(path, encryption_key=key)
    # The secret key alone does not say who may sign.
    (tmp_path / "secret.json").write_text(json.dumps(keys.jwk()))
    alone = (fst.EncryptionKey.from_file(tmp_path / "secret.json"), fst.EncryptionKey.from_bytes(keys.secret))
    for key in (*alone, fst.EncryptionKey.from_passphrase("open sesame")):
        with pytest.raises(ValueError, match=r'JWK Set.*secret key "vault".*"signer"'):
            fst.load_file(path, encryption_key=key)
    with pytest.raises(ValueError, match="encrypted by CryptoTensors"):
        fst.load_file(path)
    # Several signers.
    jwks = [keys.jwk(), stranger.signer_jwk(), keys.signer_jwk()]
    (tmp_path / "both.json").write_text(json.dumps({"keys": jwks}))
    assert_loaded(fst.load_file(path, encryption_key=fst.EncryptionKey.from_file(tmp_path / "both.json")))


def test_another_secret_key_is_an_integrity_error(keys: Keys, path: Path, tmp_path: Path) -> None:
    other = fst.EncryptionKey.from_file(Keys(signer=keys.signer).write(tmp_path / "other.json"))
    with pytest.raises(fst.IntegrityError, match='another key: "vault"'):
        fst.load_file(path, encryption_key=other)


def test_keys_are_registered_with_their_signers(keys: Keys, key: fst.EncryptionKey, path: Path) -> None:
    secret = fst.EncryptionKey.from_bytes(keys.secret, "vault")
    other = fst.EncryptionKey.random()
    for registered in (other, secret, key):
        registered.register()
    assert_loaded(fst.load_file(path))
    for registered in (other, secret, key):
        registered.unregister()
    with pytest.raises(ValueError, match="JWK Set"):
        fst.load_file(path)


def test_a_key_of_a_set_encrypts_too(keys: Keys, key: fst.EncryptionKey, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    fst.save_file({"a": torch.ones(3)}, path, encryption_key=key)
    with pytest.raises(fst.IntegrityError, match='"vault"'):
        fst.load_file(path, encryption_key=fst.EncryptionKey.random())
    labeled = fst.EncryptionKey.from_file(tmp_path / "keys.json", "another label")
    fst.save_file({"a": torch.ones(3)}, path, encryption_key=labeled)
    with pytest.raises(fst.IntegrityError, match="another label"):
        fst.load_file(path, encryption_key=fst.EncryptionKey.random())


def test_key_files_that_are_no_sets_are_refused(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for content, text in [
        ("{", "line 1"),
        (json.dumps({"keys": [keys.signer_jwk()]}), "exactly one secret key"),
        (json.dumps({"keys": [keys.jwk(), keys.jwk()]}), "exactly one secret key"),
        (json.dumps(keys.jwk() | {"k": encode(secrets.token_bytes(16))}), "16 bytes"),
        (json.dumps(keys.jwk() | {"kid": "x" * 65}), "label"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=text) as error:
            fst.EncryptionKey.from_file(path)
        assert "keys.json" in str(error.value)
        assert encode(keys.secret)[:8] not in str(error.value)


def test_files_are_neither_rotated_nor_written(keys: Keys, key: fst.EncryptionKey, path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match="does not rotate"):
        fst.rotate_key(path, key, fst.EncryptionKey.random())
    assert path.read_bytes() == before
    for name in ("__crypto_keys__", "__encryption__"):
        with pytest.raises(ValueError, match="only reads"):
            fst.save_file({"a": torch.ones(1)}, tmp_path / "new.safetensors", {name: "{}"})
