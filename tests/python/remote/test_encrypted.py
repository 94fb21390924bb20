"""Encrypted files on an HTTP server."""

import pytest
import torch

import fst
from fst.compat.tensorizer import EncryptionParams, TensorSerializer
from fst_bench.http_server import Server
from objects import assert_equal, request_counts, tensors

TENSORS = tensors()
KEY = fst.EncryptionKey.from_bytes(bytes(range(32)))
PATH = "m.safetensors"


@pytest.fixture
def data(tmp_path):
    fst.save_file(TENSORS, tmp_path / PATH, encryption_key=KEY)
    return (tmp_path / PATH).read_bytes()


@pytest.mark.parametrize("request_bytes", [None, 1 << 18, 1_500_000])
def test_data_are_decrypted_and_requested_once(http_server: Server, data, request_bytes, monkeypatch):
    if request_bytes:
        monkeypatch.setenv("FST_REQUEST_BYTES", str(request_bytes))
    http_server.put(PATH, data)
    assert_equal(fst.load_file(http_server.url(PATH), encryption_key=KEY), TENSORS)
    assert (request_counts(http_server, PATH, len(data)) == 1).all()


def test_slices_request_whole_chunks(http_server: Server, data):
    http_server.put(PATH, data)
    with fst.safe_open(http_server.url(PATH), encryption_key=KEY) as file:
        http_server.reset()
        part = file.get_slice("large")[700:710, 3:]
    assert torch.equal(part, TENSORS["large"][700:710, 3:])
    assert sum(stop - start for start, stop in (request.range for request in http_server.requests(PATH))) <= 1 << 20


def test_changed_data_are_an_integrity_error(http_server: Server, data):
    changed = bytearray(data)
    changed[-2_000_000] ^= 1
    http_server.put(PATH, bytes(changed))
    with pytest.raises(fst.IntegrityError, match=r"m\.safetensors: tensor"):
        fst.load_file(http_server.url(PATH), encryption_key=KEY)


def test_without_the_key_no_encrypted_bytes_are_returned(http_server: Server, data):
    http_server.put(PATH, data)
    with pytest.raises(ValueError, match="encrypted"):
        fst.load_file(http_server.url(PATH))


def test_headers_of_near_tensors_share_requests(http_server: Server, tmp_path):
    # Data of 4 KiB after each data of 256 KiB, and many tensors with short data.
    large = {
        f"{index:03}.{name}": torch.rand(size) for index in range(40) for name, size in (("a", 65536), ("b", 1024))
    }
    small = {f"small {index:04}": torch.rand(64) for index in range(300)}
    params = EncryptionParams.random()
    with TensorSerializer(tmp_path / "m.tensors", encryption=params) as serializer:
        serializer.write_state_dict(large | small)
    data = (tmp_path / "m.tensors").read_bytes()
    http_server.put("m.tensors", data)
    key = fst.EncryptionKey.from_bytes(bytes(params.key))
    with fst.safe_open(http_server.url("m.tensors"), encryption_key=key) as file:
        requests = [request.range for request in http_server.requests("m.tensors")]
        # The first request brings 1 MiB. Others bring two headers, and the data of 4 KiB between them; the last one
        # brings all headers of the small tensors.
        assert len(requests) <= 1 + len(large) / 2 + 2
        assert sum(stop - start for start, stop in requests) < 0.3 * len(data)
        assert_equal(file.get_tensors(), large | small)
