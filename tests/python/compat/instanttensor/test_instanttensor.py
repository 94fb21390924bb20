"""`fst.compat.instanttensor.safe_open` without a process group, and comparison with InstantTensor."""

import fnmatch
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fst
from fst.compat import instanttensor as compat
from fst.compat.instanttensor._impl import file_in_memory, read_safetensors_metadata
from fst.compat.instanttensor._names import matcher
from groups import FakeGroup
from instanttensor_examples import FILES, WEIGHTS, assert_weights
from rawfile import DTYPES, UNSUPPORTED_DTYPES, assert_same, random_raw, write

pytestmark = pytest.mark.usefixtures("directory")


@pytest.mark.parametrize("options", [{}, {"copy": False}, {"buffer_size": 1}, {"load_now": False}])
def test_tensors_need_no_clone(directory, options):
    with compat.safe_open(FILES, "pt", "cpu", **options) as file:
        tensors = dict(file.tensors())
    for name in FILES:
        (directory / name).unlink()
    assert_weights(tensors)
    tensors["position"].zero_()
    assert_same(tensors["model.norm.bias"], WEIGHTS["model.norm.bias"])


def test_every_dtype(tmp_path):
    raws = {dtype: random_raw(dtype, (3, 4)) for dtype in DTYPES}
    write(tmp_path / "all.safetensors", raws)
    with compat.safe_open("all.safetensors", "pt", "cpu") as file:
        tensors = dict(file.tensors())
        for dtype, raw in raws.items():
            assert_same(tensors[dtype], raw.tensor())
            assert_same(file.get_tensor(dtype), raw.tensor())
            assert file.get_tensor_metadata(dtype) == (raw.torch_dtype, torch.Size(raw.torch_shape))


def test_unsupported_dtypes(tmp_path):
    [dtype, *_] = UNSUPPORTED_DTYPES
    write(tmp_path / "six.safetensors", {"x": random_raw(dtype, (4,)), "y": random_raw("F32", (1,))})
    file = compat.safe_open("six.safetensors", "pt", "cpu")
    assert file.get_tensor_metadata("y") == (torch.float32, torch.Size([1]))
    with pytest.raises(NotImplementedError, match=dtype):
        file.get_tensor_metadata("x")


def test_order_of_tensors():
    files = FILES[::-1]
    with compat.safe_open(files, "pt", "cpu") as file:
        assert files == FILES[::-1]
        names = [name for name, _ in file.tensors()]
        assert names == file.keys() == file.offset_keys() == [name for part in FILES for name in fst.tensor_names(part)]
        assert [name for name, _ in file.tensors()] == names


@pytest.mark.parametrize("filename", ["model.safetensors", Path("model.safetensors"), ("model.safetensors",)])
def test_paths(filename):
    with compat.safe_open(filename, "pt", torch.device("cpu")) as file:
        assert_weights(dict(file.tensors()))


def test_tensors_in_any_order():
    with compat.safe_open("model.safetensors", "pt", "cpu") as file:
        assert_weights({name: file.get_tensor(name) for name in reversed(file.keys())})
        for get in (file.get_tensor, file.get_tensor_metadata):
            with pytest.raises(KeyError, match="nothing"):
                get("nothing")


def test_closed_iterator_ends_stream(monkeypatch):
    streams = []
    real = fst.stream

    def stream(*arguments, **options):
        streams.append((real(*arguments, **options), options["window_bytes"]))
        return streams[-1][0]

    monkeypatch.setattr(fst, "stream", stream)
    with compat.safe_open("model.safetensors", "pt", "cpu", buffer_size=100) as file:
        for _ in file.tensors():
            break
    [(left, window_bytes)] = streams
    assert list(left) == []
    assert window_bytes == 100


def test_closed_file():
    with compat.safe_open("model.safetensors", "pt", "cpu") as file:
        pass
    with pytest.raises(RuntimeError, match=r"model\.safetensors'\] had ended"):
        file.tensors()
    assert len(file.keys()) == 3


def test_metadata_of_several_files():
    assert compat.safe_open(FILES, "pt", "cpu").metadata() == {"shard": "1"}
    save_file({"x": torch.ones(1)}, "n.safetensors", metadata={"shard": "2"})
    assert compat.safe_open([*FILES, "n.safetensors"], "pt", "cpu").metadata() == {"shard": "2"}


@pytest.mark.parametrize(
    ("patterns", "mode", "kept"),
    [
        (None, "glob", set(WEIGHTS)),
        ([], "glob", set()),
        (["model.*"], "glob", {"model.embed_tokens.weight", "model.norm.bias"}),
        (["position", "model.?orm.bias"], "glob", {"position", "model.norm.bias"}),
        (["position", "model.*"], "exact", {"position"}),
        (["pos"], "regex", set()),
        (["pos.*", r".*\.bias"], "regex", {"position", "model.norm.bias"}),
    ],
)
def test_filters(patterns, mode, kept):
    options = {"tensor_filter": patterns, "tensor_name_match_mode": mode}
    with compat.safe_open("model.safetensors", "pt", "cpu", **options) as file, fst.profile() as profile:
        assert {name for name, _ in file.tensors()} == set(file.keys()) == kept
    assert profile.summary().tensors == len(kept)


@given(st.lists(st.text("ab.*?[]", max_size=4), max_size=3), st.text("ab.[]", max_size=5))
def test_globs_match_fnmatch(patterns, name):
    assert matcher(patterns, "glob")(name) == any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_invalid_filters():
    with pytest.raises(ValueError, match="tensor_name_match_mode"):
        matcher(["a"], "fuzzy")
    with pytest.raises(ValueError, match=re.escape("'(' is not a valid regular expression")):
        matcher(["("], "regex")
    for patterns in ("a", [1]):
        with pytest.raises(TypeError, match="list of str"):
            matcher(patterns, "glob")


def test_invalid_arguments():
    with pytest.raises(ValueError, match="'np'"):
        compat.safe_open("model.safetensors", "np", "cpu")
    for group in (-100, FakeGroup(4)):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            compat.safe_open("model.safetensors", "pt", "cpu", process_group=group)
    with compat.safe_open("model.safetensors", "pt", "cpu", process_group=FakeGroup(1)) as file:
        assert len(file.keys()) == 3


def test_name_in_two_files():
    with pytest.raises(fst.SafetensorError, match="position"):
        compat.safe_open(["model.safetensors", FILES[1]], "pt", "cpu")


def test_invalid_files():
    Path("cut.safetensors").write_bytes(Path("model.safetensors").read_bytes()[:-1])
    for opens in (lambda path: compat.safe_open(path, "pt", "cpu"), read_safetensors_metadata):
        with pytest.raises(fst.SafetensorError, match=r"cut\.safetensors"):
            opens("cut.safetensors")
        with pytest.raises(FileNotFoundError):
            opens("none.safetensors")


def test_backends():
    backends = [*compat.Backend, *compat.BackendPolicy]
    assert len(backends) == 7
    for backend in [*backends, backends]:
        with compat.safe_open("model.safetensors", "pt", "cpu", backend=backend) as file:
            assert_weights(dict(file.tensors()))


def test_backend_values():
    assert [backend.value for backend in compat.Backend] == list(range(6))
    assert compat.Backend(5) is compat.Backend.MMAP
    assert compat.BackendPolicy("BUFFERED") is compat.BackendPolicy.BUFFERED


def test_invalid_backends(monkeypatch):
    for backend, error in (("URING", TypeError), ([0], TypeError), ([], ValueError)):
        with pytest.raises(error, match="backend"):
            compat.safe_open("model.safetensors", "pt", "cpu", backend=backend)
    monkeypatch.setenv("INSTANTTENSOR_BACKEND", "URING, BUFFERED,")
    compat.safe_open("model.safetensors", "pt", "cpu")
    for names, message in (("uring", "'uring'; the names are AIO"), (" ,", "cannot be empty")):
        monkeypatch.setenv("INSTANTTENSOR_BACKEND", names)
        with pytest.raises(ValueError, match=f"INSTANTTENSOR_BACKEND.*{message}"):
            compat.safe_open("model.safetensors", "pt", "cpu")
        # The argument stands before the variable.
        compat.safe_open("model.safetensors", "pt", "cpu", backend=compat.Backend.AIO)


def test_buffer_size_in_the_environment(monkeypatch):
    windows = []
    real = fst.stream
    monkeypatch.setattr(fst, "stream", lambda *args, **options: windows.append(options) or real(*args, **options))
    monkeypatch.setenv("INSTANTTENSOR_BUFFER_SIZE", "100")
    for options, buffer_size in (({}, 100), ({"buffer_size": 200}, 200)):
        with compat.safe_open("model.safetensors", "pt", "cpu", **options) as file:
            assert_weights(dict(file.tensors()))
            assert file.buffer_size == buffer_size
    assert windows == [{"window_bytes": 100}, {"window_bytes": 200}]
    monkeypatch.setenv("INSTANTTENSOR_BUFFER_SIZE", "1 GiB")
    with pytest.raises(ValueError, match=r"INSTANTTENSOR_BUFFER_SIZE.*'1 GiB'"):
        compat.safe_open("model.safetensors", "pt", "cpu")


def test_attributes():
    with compat.safe_open(FILES, "pt", "cpu", tensor_filter=["model.*"]) as file:
        assert (file.framework, file.device, file.process_group) == ("pt", torch.device("cpu"), None)
        assert (file.rank, file.world_size) == (0, 1)
        assert file.buffer_size == 512 << 20
        assert file.total_tensor_size == sum(tensor.nbytes for _, tensor in file.tensors())


def test_file_in_memory():
    # /proc is neither a disk nor a memory file system.
    assert not file_in_memory("/proc/self/status")
    with pytest.raises(FileNotFoundError):
        file_in_memory("none.safetensors")


@pytest.mark.parametrize("path", ["model.safetensors", *FILES])
def test_headers_match_instanttensor(real, path):
    ours, theirs = read_safetensors_metadata(path), real.read_safetensors_metadata(path)
    assert ours == theirs


def test_file_systems_match_instanttensor(real):
    for path in ("model.safetensors", "/proc/self/status", *map(str, Path("/dev/shm").iterdir())):
        assert file_in_memory(path) == real.file_in_memory(path)


def test_names_match_instanttensor(real):
    import instanttensor

    assert set(instanttensor.__all__) <= set(compat.__all__)
    for name in ("Backend", "BackendPolicy"):
        ours, theirs = getattr(compat, name), getattr(real, name)
        assert [(member.name, member.value) for member in ours] == [(member.name, member.value) for member in theirs]


@pytest.mark.gpu
def test_tensors_match_instanttensor(real):
    with real.safe_open(FILES, "pt", 0) as theirs, compat.safe_open(FILES, "pt", 0) as ours:
        for (name, tensor), (other_name, other) in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert name == other_name
            assert_same(tensor.cpu(), other.cpu())
