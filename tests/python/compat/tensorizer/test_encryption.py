"""Encrypted files: written and read, and refused if anything in them was changed."""

from functools import partial
from pathlib import Path

import pytest
import torch

import fst
from fst.compat.tensorizer import CryptographyError, DecryptionParams, EncryptionParams
from fst.compat.tensorizer import TensorDeserializer as Deserializer
from fst.compat.tensorizer import TensorSerializer as Serializer
from fst.compat.tensorizer.serialization import HashMismatchError
from rawfile import assert_all_same, assert_same
from saved import flip_bit
from tensorizer_helpers import DEVICES, both_libraries, save

KEY = bytes(range(32))
PARAMS = DecryptionParams.from_key(KEY)
MIN = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}
PIECE_BYTES = 2 << 20


def tensors():
    torch.manual_seed(5)
    return {
        "w": torch.randn(5, 7),
        "b": torch.randn(3).bfloat16(),
        "n": torch.arange(9),
        "s": torch.tensor(2.5),
        "large": torch.randint(0, 255, (PIECE_BYTES + 1,), dtype=torch.uint8),
    }


def write(path, state_dict, encryption=None, library=fst.compat.tensorizer):
    save(path, state_dict, library, encryption or library.EncryptionParams(KEY))


@pytest.fixture
def expected():
    state_dict = tensors()
    write("m.tensors", state_dict)
    return state_dict


def data_of(name):
    """Returns the offsets of the first byte of a tensor's data, and of the byte after the last."""
    with Deserializer("m.tensors", device="cpu", encryption=PARAMS, lazy_load=True) as found:
        info = found._checkpoint.tensor_info(name)
    return info.begin, info.begin + info.nbytes


@pytest.mark.parametrize(("lazy_load", "verify_hash"), [(False, True), (True, False)])
def test_tensors_are_read_as_written(expected, lazy_load, verify_hash):
    content = Path("m.tensors").read_bytes()
    assert not any(bytes(tensor.view(-1).view(torch.uint8).numpy()) in content for tensor in expected.values())
    assert KEY not in content
    # The serializer encrypts copies.
    assert_all_same(tensors(), expected)
    with Deserializer("m.tensors", "cpu", lazy_load=lazy_load, verify_hash=verify_hash, encryption=PARAMS) as found:
        assert_all_same(found, expected)
        assert_all_same(found.tree(), expected)
    with Deserializer("m.tensors", "cpu", lazy_load=True, encryption=PARAMS) as found:
        assert [name for _, _, name, _ in found.read_tensors(verify_hash=verify_hash, num_tensors=2)] == ["w", "b"]
        assert [name for _, _, name, *_ in found.read_numpy_arrays()] == ["n", "s", "large"]


@pytest.mark.parametrize(
    ("path", "key", "decryption"),
    [
        ("m.tensors", fst.EncryptionKey.from_callback(lambda: KEY), PARAMS),
        ("m.safetensors", fst.EncryptionKey.from_bytes(KEY), PARAMS),
        (
            "m.tensors",
            fst.EncryptionKey.from_passphrase("secret", passes=1, memory_bytes=8 << 10),
            DecryptionParams.from_string("secret"),
        ),
    ],
    ids=["callback", "bytes", "passphrase"],
)
def test_keys_of_fst_encrypt(path, key, decryption):
    state_dict = tensors()
    write(path, state_dict, encryption=key)
    assert state_dict["large"].numpy().tobytes() not in Path(path).read_bytes()
    assert_all_same(fst.load_file(path, encryption_key=key), state_dict)
    with Deserializer(path, "cpu", encryption=decryption) as found:
        assert_all_same(found, state_dict)


def test_casts(expected):
    for options in ({}, {"lazy_load": True}, {"verify_hash": True}):
        found = Deserializer("m.tensors", "cpu", dtype=torch.float64, encryption=PARAMS, **options)
        assert_same(found["w"].detach(), expected["w"].double())
        assert found["n"].dtype == torch.int64
    found = Deserializer("m.tensors", "cpu", dtype=torch.float64, encryption=PARAMS, lazy_load=True)
    assert {tensor.dtype for *_, tensor in found.read_tensors()} == {torch.float64, torch.int64, torch.uint8}


def test_keys_from_strings(expected):
    params = EncryptionParams.from_string("secret", **MIN)
    assert len(params.salt) == 16
    shown = repr([params, DecryptionParams.from_string("secret"), DecryptionParams.from_key(params.key)])
    assert shown == "[EncryptionParams(<hidden>), DecryptionParams(<hidden>), DecryptionParams(<hidden>)]"
    write("m.tensors", expected, params)
    with fst.profile() as profile:
        for key in (DecryptionParams.from_string("secret"), DecryptionParams.from_key(params.key)):
            assert_all_same(Deserializer("m.tensors", "cpu", encryption=key), expected)
    profile.save_trace("profile.json")
    trace = Path("profile.json").read_text()
    assert not any(text in trace for text in ("secret", params.key.hex(), str(list(params.key)), str(params.key)))
    with pytest.raises(CryptographyError, match="Tensor decryption failed") as refused:
        Deserializer("m.tensors", "cpu", encryption=DecryptionParams.from_string("Secret"))
    assert "Secret" not in repr([refused.value, refused.value.__context__])
    same = EncryptionParams.from_string(b"secret", **MIN, salt=params.salt)
    assert same.key == params.key
    with pytest.raises(ValueError, match="no salt"):
        _ = EncryptionParams.random().salt


def test_errors_of_keys(expected):
    for make in (EncryptionParams, DecryptionParams.from_key):
        with pytest.raises(ValueError, match="32"):
            make(b"short")
    with pytest.raises(TypeError, match="from_string"):
        EncryptionParams("a string")
    for make in (EncryptionParams.from_string, DecryptionParams.from_string):
        with pytest.raises(ValueError, match="empty"):
            make("")
    for limits in ((0, 8192), (1, 8191), (1, 1 << 40), (1 << 40, 8 << 20)):
        with pytest.raises(ValueError, match="memlimit"):
            EncryptionParams.from_string("secret", *limits)
    with pytest.raises(ValueError, match="salt"):
        EncryptionParams.from_string("secret", **MIN, salt="short")
    with pytest.raises(CryptographyError, match="not derived from a string"):
        Deserializer("m.tensors", "cpu", encryption=DecryptionParams.from_string("secret"))
    with pytest.raises(ValueError, match="neither"):
        Deserializer("m.tensors", "cpu", encryption=DecryptionParams())
    with pytest.raises(CryptographyError, match="Tensor is encrypted, but decryption was not requested"):
        Deserializer("m.tensors", "cpu")
    for path in ("plain.tensors", "plain.safetensors"):
        save(path, expected)
        with pytest.raises(CryptographyError, match="Tensor decryption was requested"):
            Deserializer(path, "cpu", encryption=PARAMS)
    with pytest.raises(ValueError, match="cannot be replaced"):
        fst.rotate_key("m.tensors", fst.EncryptionKey.from_bytes(KEY), fst.EncryptionKey.random())
    for make in (Serializer, Deserializer):
        with pytest.raises(TypeError, match="encryption"):
            make("m.tensors", encryption=KEY)
    with pytest.raises(NotImplementedError, match=r"an fst\.EncryptionKey"):
        Serializer("m.safetensors", encryption=EncryptionParams(KEY))


@pytest.mark.parametrize(("lazy_load", "verify_hash"), [(False, True), (True, False)])
def test_changed_data_are_refused(expected, lazy_load, verify_hash):
    """tests/rust/tensors_format.rs changes every byte of a file."""
    flip_bit(Path("m.tensors"), data_of("large")[1] - 1)
    with pytest.raises(fst.IntegrityError, match="large"):
        fst.verify("m.tensors", encryption_key=PARAMS.encryption_key())
    with pytest.raises(CryptographyError, match=r"Tensor decryption failed.*large"):
        Deserializer("m.tensors", "cpu", encryption=PARAMS, lazy_load=lazy_load, verify_hash=verify_hash)["large"]
    found = Deserializer("m.tensors", "cpu", encryption=PARAMS, lazy_load=True)
    assert_same(found["w"].detach(), expected["w"])
    received = []
    with pytest.raises(CryptographyError):
        received.extend(name for _, _, name, _ in found.read_tensors())
    assert "large" not in received


def test_hashes_of_encrypted_tensors_are_verified(expected):
    header_end, _ = data_of("w")
    # A SHA-256 of 32 bytes, in the header before the data. It is not encrypted.
    begin = Path("m.tensors").read_bytes().rindex(b"\x01\x20", 0, header_end)
    flip_bit(Path("m.tensors"), begin + 2)
    assert_same(Deserializer("m.tensors", "cpu", encryption=PARAMS)["w"].detach(), expected["w"])
    key = PARAMS.encryption_key()
    opened = fst.safe_open("m.tensors", verify=True, encryption_key=key)
    for call in (
        partial(fst.load_file, "m.tensors", verify=True, encryption_key=key),
        partial(fst.verify, "m.tensors", encryption_key=key),
        partial(opened.get_tensor, "w"),
    ):
        with pytest.raises(fst.IntegrityError, match=r'"w": .*the digest'):
            call()
    # What no hash covers is authentic.
    assert_same(opened.get_slice("w")[1:3], expected["w"][1:3])
    with pytest.raises(HashMismatchError, match='"w"'):
        Deserializer("m.tensors", "cpu", encryption=PARAMS, verify_hash=True)
    with pytest.raises(HashMismatchError, match='"w"'):
        list(Deserializer("m.tensors", "cpu", encryption=PARAMS, lazy_load=True).read_tensors(verify_hash=True))


@pytest.mark.parametrize("device", DEVICES)
def test_loads_of_fst_take_keys(expected, device):
    keys = [fst.EncryptionKey.from_passphrase("secret"), PARAMS.encryption_key()]
    for name, tensor in fst.stream("m.tensors", device, encryption_key=keys[1]):
        assert_same(tensor.cpu(), expected[name])
    with fst.safe_open("m.tensors", encryption_key=keys[1]) as file:
        # The bytes around the border of two pieces.
        assert torch.equal(file.get_slice("large")[PIECE_BYTES - 3 :], expected["large"][PIECE_BYTES - 3 :])
        assert torch.equal(file.get_slice("w")[1:4, 2:5], expected["w"][1:4, 2:5])
    fst.verify("m.tensors", encryption_key=keys[1])
    for key in keys:
        key.register()
    try:
        assert_all_same(torch.ops.fst.load_file("m.tensors"), expected)
        assert_all_same(Deserializer("m.tensors", "cpu"), expected)
    finally:
        for key in keys:
            key.unregister()


def test_files_of_both_libraries(original):
    state_dict = tensors()
    for library, path in both_libraries(original):
        params = library.EncryptionParams.from_string("secret", **MIN)
        for encryption in (params, library.EncryptionParams(params.key)):
            meta = {"meta": torch.empty(4, device="meta")}
            if library is fst.compat.tensorizer:
                # The package does not encrypt it, and so cannot read it.
                meta["scalar"] = torch.empty((), device="meta")
            write(path, state_dict | meta, encryption, library)
            for reader in (original, fst.compat.tensorizer):
                keys = [reader.DecryptionParams.from_key(params.key)]
                if encryption is params:
                    keys.append(reader.DecryptionParams.from_string("secret"))
                for key in keys:
                    found = reader.TensorDeserializer(path, device="cpu", verify_hash=True, encryption=key)
                    for name, tensor in state_dict.items():
                        assert_same(found[name].detach(), tensor)
                    for name, tensor in meta.items():
                        assert_same(found[name].detach(), torch.zeros_like(tensor, device="cpu"))
                    found.close()
    arguments = ("secret", 2, 1 << 20, b"0123456789abcdef")
    assert EncryptionParams.from_string(*arguments).key == original.EncryptionParams.from_string(*arguments).key
    for name in ("OpsLimit", "MemLimit"):
        theirs, ours = getattr(original.EncryptionParams, name), getattr(EncryptionParams, name)
        assert {preset.name: int(preset) for preset in theirs} == {preset.name: int(preset) for preset in ours}
    with pytest.raises(original.CryptographyError):
        original.TensorDeserializer("ours.tensors", device="cpu", encryption=original.DecryptionParams.from_key(KEY))
