"""Which files of a remote index are opened, and what is checked when."""

import json

import pytest
import torch
from safetensors.torch import save

import fst
from objects import HEADER
from rawfile import assert_same

COUNT = 40
INDEX = "many/model.safetensors.index.json"
# The tensor follows the bytes that the first request for its file brings.
NAME = "7.last"


def _file(number: int) -> str:
    return f"model-{number + 1:05}-of-{COUNT:05}.safetensors"


def _shard(number: int) -> dict[str, torch.Tensor]:
    tensors = {f"{number}.weight": torch.full((64,), float(number)), f"{number}.bias": torch.ones(number + 1)}
    if NAME.startswith(f"{number}."):
        # safetensors stores wide dtypes first.
        tensors |= {f"{number}.first": torch.zeros(HEADER // 4), NAME: torch.randn(1000).half()}
    return tensors


SHARDS = {_file(number): _shard(number) for number in range(COUNT)}
MAP = {name: file for file, tensors in SHARDS.items() for name in tensors}
TENSORS = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
BYTES = {file: save(tensors) for file, tensors in SHARDS.items()}


@pytest.fixture
def url(http_server):
    """Returns the URL of an index of 40 files."""
    for file, data in BYTES.items():
        http_server.put(f"many/{file}", data)
    put_index(http_server, MAP)
    return http_server.url(INDEX)


def put_index(server, weight_map):
    server.put(INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}).encode())


def by_slice(url):
    with fst.safe_open(url) as file:
        assert NAME in file.keys()  # noqa: SIM118
        return file.get_slice(NAME)[:]


LOADS = {
    "load_tensors": lambda url: fst.load_tensors(url, [NAME])[0],
    "dtype": lambda url: fst.load_tensors(url, [NAME], dtype={"39.bias": torch.float64, "*": torch.half})[0],
    "operator": lambda url: torch.ops.fst.load_slices([url], [NAME], [0], [0], [1000])[0],
    "get_tensor": lambda url: fst.safe_open(url).get_tensor(NAME),
    "get_slice": by_slice,
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_one_tensor_takes_few_requests(http_server, url, load):
    with fst.profile() as p:
        assert_same(load(url), TENSORS[NAME])
    assert p.summary().requests == len(http_server.requests()) <= 4
    assert http_server.counts().sent_bytes < 2 * len(BYTES[MAP[NAME]])


def test_names_take_one_request(http_server, url):
    names = [name for file in sorted(SHARDS) for name in sorted(SHARDS[file])]
    assert fst.tensor_names(url) == names
    assert torch.ops.fst.tensor_names([url]) == names
    assert fst.safe_open(url).keys() == sorted(names)
    assert len(http_server.requests()) == 3


def test_commands_take_few_requests(http_server, url, command):
    done = command("ls", url, "--tensors", "--json")
    assert set(json.loads(done.stdout)["names"]) == set(MAP)
    assert http_server.reset().requests == 1
    done = command("cat", url, NAME, "--slice", "0:2")
    assert "F16 [2]" in done.stdout
    assert len(http_server.requests()) <= 4


def test_other_tensors_open_all_files(http_server, url):
    file = fst.safe_open(url)
    assert_same(file.get_tensor("3.weight"), TENSORS["3.weight"])
    opened = len(http_server.requests())
    assert_same(file.get_tensor("4.weight"), TENSORS["4.weight"])
    # Each file once, except the one that is open, and the index, which has not changed.
    assert len(http_server.requests()) - opened == COUNT
    assert file.offset_keys() == list(fst.load_file(url))


def test_an_index_that_lies_is_found_when_its_file_is_open(http_server, url):
    with pytest.raises(KeyError, match="nearest names"):
        fst.load_tensors(url, ["3.weihgt"])
    put_index(http_server, MAP | {"3.weight": _file(4)})
    with pytest.raises(KeyError, match=r"the index says that .*00005-of"):
        fst.load_tensors(url, ["3.weight"])
    # The file holds a tensor that it should not.
    http_server.put(f"many/{_file(5)}", save({"6.weight": torch.zeros(2), "5.weight": torch.zeros(3)}))
    assert_same(fst.load_tensors(url, ["6.weight"])[0], TENSORS["6.weight"])
    with pytest.raises(fst.SafetensorError, match=r"the name is in .* too"):
        fst.load_tensors(url, ["6.weight", "5.weight"])


def test_a_missing_file_is_an_error_once_it_is_needed(http_server, url):
    http_server.remove(f"many/{_file(9)}")
    file = fst.safe_open(url)
    assert_same(file.get_tensor("3.weight"), TENSORS["3.weight"])
    with pytest.raises(FileNotFoundError, match=_file(9)):
        file.get_tensor("4.weight")


def test_a_save_after_the_first_tensor_is_an_error(http_server, url):
    file = fst.safe_open(url)
    file.get_tensor("3.weight")
    put_index(http_server, {**MAP, "more": _file(0)})
    with pytest.raises(fst.SourceChangedError, match="open it again"):
        file.get_tensor("4.weight")
