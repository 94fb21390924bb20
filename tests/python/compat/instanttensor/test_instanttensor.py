"""`fst.compat.instanttensor.safe_open` without a process group, and comparison with InstantTensor."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst.compat import instanttensor as compat
from fst.compat.instanttensor._impl import file_in_memory, read_safetensors_metadata
from groups import FakeGroup
from rawfile import UNSUPPORTED_DTYPES, assert_same, random_raw, write

pytestmark = pytest.mark.usefixtures("files")

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "model.norm.bias": torch.ones(4),
    "position": torch.arange(5),
}


@pytest.fixture
def files():
    """Saves the weights in one file and in two, in the working directory. Returns the names of the two."""
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(WEIGHTS, "model.safetensors", metadata={"format": "pt"})
    first, *rest = WEIGHTS
    save_file({first: WEIGHTS[first]}, files[0], metadata={"shard": "1"})
    save_file({name: WEIGHTS[name] for name in rest}, files[1])
    return files


def assert_weights(tensors, device="cpu"):
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.device == torch.device(device)
        assert_same(tensor.cpu(), WEIGHTS[name])


@pytest.fixture
def real():
    return pytest.importorskip("instanttensor._impl")


def open_model(**options):
    return compat.safe_open("model.safetensors", "pt", "cpu", **options)


@pytest.mark.parametrize(
    ("filename", "options"),
    [
        ("model.safetensors", {}),
        (Path("model.safetensors"), {}),
        (("model.safetensors",), {"buffer_size": 1}),
        ("model.safetensors", {"chunk_size": 8 << 20, "concurrency": 4, "io_depth": 32, "max_free_mem_usage": 0.6}),
        (["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"], {"load_now": False}),
    ],
)
def test_tensors_need_no_clone(filename, options):
    compat.init()
    with compat.safe_open(filename, "pt", torch.device("cpu"), FakeGroup(1), **options) as file:
        tensors = dict(file.tensors())
        named = {name: file.get_tensor(name) for name in reversed(file.keys())}
        for get in (file.get_tensor, file.get_tensor_metadata):
            with pytest.raises(KeyError, match="nothing"):
                get("nothing")
    for path in Path().glob("*.safetensors"):
        os.unlink(path)
    assert_weights(tensors)
    assert_weights(named)
    tensors["position"].zero_()
    assert_same(tensors["model.norm.bias"], WEIGHTS["model.norm.bias"])


def test_header():
    metadata, entries, header_bytes = read_safetensors_metadata("model.safetensors")
    assert metadata == {"format": "pt"}
    assert list(entries) == fst.tensor_names("model.safetensors")
    assert entries["position"] == {"dtype": "I64", "shape": [5], "data_offsets": [0, 40]}
    assert header_bytes + sum(tensor.nbytes for tensor in WEIGHTS.values()) == os.path.getsize("model.safetensors")


def test_unsupported_dtypes(tmp_path):
    [dtype, *_] = UNSUPPORTED_DTYPES
    write(tmp_path / "six.safetensors", {"x": random_raw(dtype, (4,)), "y": random_raw("F32", (1,))})
    file = compat.safe_open("six.safetensors", "pt", "cpu")
    assert file.get_tensor_metadata("y") == (torch.float32, torch.Size([1]))
    with pytest.raises(NotImplementedError, match=dtype):
        file.get_tensor_metadata("x")


def test_order_of_tensors(files):
    given = files[::-1]
    with compat.safe_open(given, "pt", "cpu") as file:
        assert given == files[::-1]
        names = [name for name, _ in file.tensors()]
        assert names == file.keys() == file.offset_keys() == [name for part in files for name in fst.tensor_names(part)]
        assert [name for name, _ in file.tensors()] == names


def test_closed_iterator_ends_stream(streams):
    with open_model(buffer_size=100) as file:
        for _ in file.tensors():
            break
    [(left, window_bytes)] = streams
    assert list(left) == []
    assert window_bytes == 100
    with pytest.raises(RuntimeError, match=r"model\.safetensors'\] had ended"):
        file.tensors()
    assert len(file.keys()) == 3


def test_metadata_of_several_files(files):
    assert compat.safe_open(files, "pt", "cpu").metadata() == {"shard": "1"}
    save_file({"x": torch.ones(1)}, "n.safetensors", metadata={"shard": "2"})
    assert compat.safe_open([*files, "n.safetensors"], "pt", "cpu").metadata() == {"shard": "2"}
    assert compat.safe_open(files[1], "pt", "cpu").metadata() is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"framework": "np"}, ValueError, "'np'"),
        ({"process_group": -100}, TypeError, r"a process group of torch\.distributed"),
        ({"process_group": FakeGroup(4)}, TypeError, r"a process group of torch\.distributed"),
    ],
)
def test_invalid_arguments(options, error, message):
    with pytest.raises(error, match=message):
        compat.safe_open("model.safetensors", **({"framework": "pt", "device": "cpu"} | options))


def test_buffer_size_in_the_environment(monkeypatch, streams):
    monkeypatch.setenv("INSTANTTENSOR_BUFFER_SIZE", "100")
    for options, buffer_size in (({}, 100), ({"buffer_size": 200}, 200)):
        with open_model(**options) as file:
            assert_weights(dict(file.tensors()))
            assert file.buffer_size == buffer_size
    assert [window_bytes for _, window_bytes in streams] == [100, 200]
    monkeypatch.setenv("INSTANTTENSOR_BUFFER_SIZE", "1 GiB")
    with pytest.raises(ValueError, match='INSTANTTENSOR_BUFFER_SIZE must be a whole number, not "1 GiB"'):
        open_model()


def test_attributes(files):
    with compat.safe_open(files, "pt", "cpu") as file:
        assert (file.framework, file.device, file.process_group) == ("pt", torch.device("cpu"), None)
        assert (file.rank, file.world_size) == (0, 1)
        assert file.buffer_size == 512 << 20


def test_file_in_memory():
    # /proc is neither a disk nor a memory file system.
    assert not file_in_memory("/proc/self/status")
    assert not file_in_memory("https://host/model.safetensors")
    if os.path.isdir("/dev/shm"):
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            assert file_in_memory(file.name)
    with pytest.raises(FileNotFoundError):
        file_in_memory("none.safetensors")


def test_helpers_match_instanttensor(real, files):
    for path in ("model.safetensors", *files):
        assert read_safetensors_metadata(path) == real.read_safetensors_metadata(path)
    for path in ("model.safetensors", "/proc/self/status", *map(str, Path("/dev/shm").iterdir())):
        assert file_in_memory(path) == real.file_in_memory(path)


def test_names_exist_in_instanttensor(real):
    import instanttensor

    assert set(compat.__all__) <= set(instanttensor.__all__)


@pytest.mark.gpu
def test_tensors_match_instanttensor(real, files):
    with real.safe_open(files, "pt", 0) as theirs, compat.safe_open(files, "pt", 0) as ours:
        for (name, tensor), (other_name, other) in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert name == other_name
            assert_same(tensor.cpu(), other.cpu())
