"""Verified loads from an HTTP server: parts of tensors, and the index of several files."""

import hashlib
import json

import pytest
import torch

import fst
from fst_bench.http_server import Server
from objects import shards

GROUP_BYTES = 1 << 20
LARGE = torch.arange(1200 * 1024, dtype=torch.float32).reshape(1200, 1024)
PATH = "m.safetensors"


def test_parts_request_whole_groups(http_server: Server, tmp_path):
    fst.save_file({"large": LARGE}, tmp_path / PATH, digests="blake3")
    data = bytearray((tmp_path / PATH).read_bytes())
    http_server.put(PATH, bytes(data))
    with fst.safe_open(http_server.url(PATH), verify=True) as file:
        http_server.reset()
        part = file.get_slice("large")[700:900]
    assert part.equal(LARGE[700:900])
    requested = [request.range for request in http_server.requests(PATH)]
    assert sum(stop - start for start, stop in requested) == 2 * GROUP_BYTES
    # In the second of the two groups.
    data[len(data) - LARGE.nbytes + 4 * GROUP_BYTES - 1] ^= 1
    http_server.put(PATH, bytes(data))
    with pytest.raises(fst.IntegrityError, match=r'm\.safetensors.*"large"'):
        fst.load_slices(http_server.url(PATH), ["large"], [0], [700], [200], verify=True)


def test_the_index_is_compared(http_server: Server):
    files, tensors = shards()
    for name, data in files.items():
        http_server.put(name, data)
    manifest = {name: "sha256:" + hashlib.sha256(data).hexdigest() for name, data in files.items()}
    index = "model.safetensors.index.json"
    assert fst.load_file(http_server.url(index), verify=manifest).keys() == tensors.keys()
    content = json.loads(files[index])
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if "-00003-" not in file}
    http_server.put(index, json.dumps(content).encode())
    with pytest.raises(fst.IntegrityError, match=f"{index}: .*the manifest states sha256:"):
        fst.load_file(http_server.url(index), verify=manifest)
    del manifest[index]
    with pytest.raises(fst.IntegrityError, match=f'{index}: "model-00003-of-00003.safetensors" is not among its files'):
        fst.load_file(http_server.url(index), verify=manifest)
