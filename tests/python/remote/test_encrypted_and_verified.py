"""Encrypted files on an HTTP server, and verified ones: parts of tensors, and the index of several files."""

import json

import pytest
import torch

import fst
from fst.compat.tensorizer import EncryptionParams, TensorSerializer
from fst_bench.http_server import Server
from objects import PATH, TENSORS, assert_equal, request_counts, shards
from saved import KEY, flip_bit, manifest_of

GROUP_BYTES = 1 << 20


@pytest.fixture
def path(http_server: Server, tmp_path):
    """Returns an encrypted file, which the server has, too."""
    fst.save_file(TENSORS, tmp_path / PATH, encryption_key=KEY)
    http_server.put(PATH, (tmp_path / PATH).read_bytes())
    return tmp_path / PATH


@pytest.mark.parametrize("request_bytes", [None, 1 << 18, 1_500_000])
def test_data_are_decrypted_and_requested_once(http_server: Server, path, request_bytes, monkeypatch):
    if request_bytes:
        monkeypatch.setenv("FST_REQUEST_BYTES", str(request_bytes))
    assert_equal(fst.load_file(http_server.url(PATH), encryption_key=KEY), TENSORS)
    assert (request_counts(http_server, PATH, path.stat().st_size) == 1).all()


def test_slices_request_whole_chunks(http_server: Server, path):
    with fst.safe_open(http_server.url(PATH), encryption_key=KEY) as file:
        http_server.reset()
        part = file.get_slice("large")[700:710, 3:]
    assert torch.equal(part, TENSORS["large"][700:710, 3:])
    assert sum(stop - start for start, stop in (request.range for request in http_server.requests(PATH))) <= 1 << 20
    flip_bit(path, -2_000_000)
    http_server.put(PATH, path.read_bytes())
    with pytest.raises(fst.IntegrityError, match=r"m\.safetensors: tensor"):
        fst.load_file(http_server.url(PATH), encryption_key=KEY)


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


def test_parts_request_whole_groups(http_server: Server, tmp_path):
    large = torch.arange(1200 * 1024, dtype=torch.float32).reshape(1200, 1024)
    fst.save_file({"large": large}, tmp_path / PATH, digests="blake3")
    http_server.put(PATH, (tmp_path / PATH).read_bytes())
    with fst.safe_open(http_server.url(PATH), verify=True) as file:
        http_server.reset()
        part = file.get_slice("large")[700:900]
    assert part.equal(large[700:900])
    requested = [request.range for request in http_server.requests(PATH)]
    assert sum(stop - start for start, stop in requested) == 2 * GROUP_BYTES
    # In the second of the two groups.
    flip_bit(tmp_path / PATH, 4 * GROUP_BYTES - 1 - large.nbytes)
    http_server.put(PATH, (tmp_path / PATH).read_bytes())
    with pytest.raises(fst.IntegrityError, match=r'm\.safetensors.*"large"'):
        fst.load_slices(http_server.url(PATH), ["large"], [0], [700], [200], verify=True)


def test_the_index_is_compared(http_server: Server, tmp_path):
    """load/test_verified_sets.py has more changes of an index."""
    files, tensors = shards()
    for name, data in files.items():
        http_server.put(name, data)
        (tmp_path / name).write_bytes(data)
    manifest = manifest_of(*tmp_path.iterdir())
    index = "model.safetensors.index.json"
    assert fst.load_file(http_server.url(index), verify=manifest).keys() == tensors.keys()
    content = json.loads(files[index])
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if "-00003-" not in file}
    http_server.put(index, json.dumps(content).encode())
    with pytest.raises(fst.IntegrityError, match=f"{index}: .*the manifest states sha256:"):
        fst.load_file(http_server.url(index), verify=manifest)
