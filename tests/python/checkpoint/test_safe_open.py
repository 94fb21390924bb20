"""`fst.safe_open`: equality with safetensors.safe_open, several files, lifetimes, threads and forks."""

import copy
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

import fst
from forked import run_in_fork
from rawfile import DTYPES, Raw, assert_all_same, assert_same, bits_of, random_raw, write

TENSORS: dict[str, Raw] = {
    **{f"{dtype}.weight": random_raw(dtype, (3, 4)) for dtype in DTYPES},
    "a.scalar": random_raw("F32", ()),
    "z.empty": random_raw("F16", (0, 4)),
}
# Dtypes that NumPy itself does not support.
FOREIGN_DTYPES = [dtype for dtype in DTYPES if dtype.startswith(("BF", "F8", "F4"))]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.safetensors", TENSORS, {"format": "pt", "who": "us"})


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "who": "us"}])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_header(tmp_path, framework, metadata):
    path = write(tmp_path / "model.safetensors", TENSORS, metadata)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    with safetensors.safe_open(path, framework) as theirs, fst.safe_open(path, framework) as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == metadata
        assert fst.metadata(path) == (metadata or {})
        for name in TENSORS:
            part, expected = ours.get_slice(name), theirs.get_slice(name)
            assert part.get_shape() == expected.get_shape()
            assert part.get_dtype() == expected.get_dtype()
            raw = TENSORS[name]
            meta = ours.get_tensor_meta(name)
            assert (meta.dtype, meta.shape, meta.nbytes) == (raw.dtype, list(raw.shape), len(raw.data))
            assert list(meta.data_offsets) == header[name]["data_offsets"]


@pytest.mark.usefixtures("reader")
def test_tensors_and_arrays(path):
    with safetensors.safe_open(path, "pt") as theirs, fst.safe_open(path, "pt") as ours:
        expected = theirs.get_tensors()
        assert list(ours.get_tensors()) == list(expected)
        assert_all_same(ours.get_tensors(), expected)
        assert_all_same({name: ours.get_tensor(name) for name in TENSORS}, expected)
    with safetensors.safe_open(path, "np") as theirs, fst.safe_open(path, "np") as ours:
        for name, raw in TENSORS.items():
            if raw.dtype not in FOREIGN_DTYPES:
                array, expected = ours.get_tensor(name), theirs.get_tensor(name)
                assert (type(array), array.dtype, array.shape) == (type(expected), expected.dtype, expected.shape)
                assert array.tobytes() == expected.tobytes()
                # The caller may change the array, as with safetensors.
                array.fill(1)


@pytest.mark.parametrize("dtype", FOREIGN_DTYPES)
def test_arrays_of_foreign_dtypes(path, dtype):
    pytest.importorskip("ml_dtypes")
    with fst.safe_open(path, "np") as file:
        name = str(DTYPES[dtype][0]).removeprefix("torch.")
        try:
            expected = np.dtype(name)
        except TypeError:
            with pytest.raises(TypeError, match=f"{name}.*ml_dtypes"):
                file.get_tensor(f"{dtype}.weight")
        else:
            array = file.get_tensor(f"{dtype}.weight")
            assert array.dtype == expected
            assert array.tobytes() == TENSORS[f"{dtype}.weight"].data


def test_several_files(tmp_path):
    names = sorted(TENSORS)
    parts = {"1.safetensors": names[9:], "2.safetensors": names[:9]}
    files = [
        write(tmp_path / file, {name: TENSORS[name] for name in part}, {"format": "pt", file: "here"})
        for file, part in parts.items()
    ]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}))
    expected = [name for file in files for name in safetensors.safe_open(file, "pt").offset_keys()]
    for given in (tmp_path, index, files):
        with fst.safe_open(given) as opened:
            assert opened.keys() == names
            assert opened.offset_keys() == list(opened.get_tensors()) == expected
            assert_all_same({name: opened.get_tensor(name) for name in names}, TENSORS)
            assert opened.metadata() == {"format": "pt", "1.safetensors": "here", "2.safetensors": "here"}


def test_contradicting_metadata(tmp_path):
    paths = [
        write(tmp_path / f"{value}.safetensors", {value: random_raw("U8", (3,))}, {"format": value}) for value in "ab"
    ]
    with fst.safe_open(paths) as file, pytest.raises(fst.SafetensorError, match='"format"') as raised:
        file.metadata()
    assert all(str(path) in str(raised.value) for path in paths)


def raised(open_file, *args, **kwargs):
    """Returns the class of the exception that opening raises, or None."""
    try:
        open_file(*args, **kwargs)
    except Exception as error:
        return type(error)
    return None


def test_arguments_match_safetensors(path):
    """drop_in/test_safetensors_errors.py compares the errors of other arguments, and of names."""
    frameworks = ["pt", "torch", "pytorch", "np", "numpy", "", None]
    devices = [("pt", device) for device in (None, "cuda", "cuda:0", 0, -1)]
    for arguments in (*((name,) for name in frameworks), *devices, ("np", None), ("np", 0)):
        theirs, ours = (raised(module.safe_open, path, *arguments) for module in (safetensors, fst))
        assert ours is theirs is None or issubclass(ours, theirs), arguments
    for backend in ("mmap", "pread"):
        assert isinstance(fst.safe_open(filename=path, framework="pt", device="cpu", backend=backend), fst.safe_open)
    for framework in ("tf", "jax", "mlx", "paddle"):
        with pytest.raises(fst.SafetensorError, match=framework):
            fst.safe_open(path, framework)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_pickle_and_copy_open_the_path_again(path, framework):
    file = fst.safe_open(path, framework)
    expected = file.get_tensor("F32.weight")
    part = file.get_slice("F32.weight")
    for again in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert (again(file).get_tensor("F32.weight") == expected).all()
        assert (again(part)[1:] == expected[1:]).all()
    file.close()
    with pytest.raises(fst.SafetensorError, match="closed"):
        pickle.loads(pickle.dumps(file)).keys()


def test_other_processes_get_the_path(path):
    # Processes that are spawned have no memory in common with this one.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(fst.safe_open.keys, [fst.safe_open(path)]) == [sorted(TENSORS)]


def test_missing_names(path):
    for method in ("get_tensor", "get_slice", "get_tensor_meta"):
        with pytest.raises(fst.SafetensorError, match=r"F32\.weight") as error:
            getattr(fst.safe_open(path), method)("F32.wieght")
        assert isinstance(error.value, KeyError)


@pytest.mark.parametrize("module", [safetensors, fst])
def test_closed_file(path, module):
    with module.safe_open(path, "pt") as file:
        tensor, part = file.get_tensor("F32.weight"), file.get_slice("F32.weight")
    for method in (file.keys, file.offset_keys, file.metadata, file.get_tensors):
        with pytest.raises(safetensors.SafetensorError, match="closed"):
            method()
    for method in (file.get_tensor, file.get_slice):
        with pytest.raises(safetensors.SafetensorError, match="closed"):
            method("F32.weight")
    assert file.__enter__() is file
    # Slices and tensors from before the close are still usable.
    assert part.get_shape() == [3, 4]
    assert_same(part[1:], TENSORS["F32.weight"].tensor()[1:])
    assert_same(tensor, TENSORS["F32.weight"].tensor())


def descriptors(path: Path) -> int:
    """Returns the number of descriptors and mappings of a file in this process."""
    opened = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            opened += os.readlink(link) == str(path)
        except FileNotFoundError:
            continue
    return opened + Path("/proc/self/maps").read_text().count(f"{path}\n")


@pytest.mark.usefixtures("reader")
def test_descriptors_and_mappings_are_released(path):
    assert descriptors(path) == 0
    with fst.safe_open(path) as file:
        assert descriptors(path) > 0
        file.get_tensor("F32.weight")
        part = file.get_slice("F32.weight")
        part[:, 1:]
    assert descriptors(path) > 0
    del part
    assert descriptors(path) == 0
    file = fst.safe_open(path)
    tensor = file.get_tensor("F32.weight")
    file.close()
    file.close()
    assert_same(tensor, TENSORS["F32.weight"].tensor())
    del tensor
    assert descriptors(path) == 0
    # An open file keeps its contents.
    file = fst.safe_open(path)
    os.replace(write(path.with_name("other"), {"F32.weight": random_raw("F64", (9,), seed=3)}), path)
    path.unlink()
    assert_same(file.get_tensor("F32.weight"), TENSORS["F32.weight"].tensor())
    assert_same(file.get_slice("F32.weight")[:, 1], TENSORS["F32.weight"].tensor()[:, 1])


@pytest.mark.usefixtures("reader")
def test_tensors_are_independent(path):
    content = path.read_bytes()
    with fst.safe_open(path) as file:
        for name in ("F32.weight", "U8.weight"):
            first, second = file.get_tensor(name), file.get_tensor(name)
            first.fill_(7)
            assert_same(second, TENSORS[name].tensor())
            del first
            third, part = file.get_tensor(name), file.get_slice(name)[1:]
            third.fill_(7)
            assert_same(part, TENSORS[name].tensor()[1:])
        assert_same(file.get_tensor("I16.weight"), TENSORS["I16.weight"].tensor())
    assert path.read_bytes() == content


@pytest.mark.usefixtures("reader")
def test_threads_share_file(path, run_threads):
    expected = {name: bits_of(raw.tensor()) for name, raw in TENSORS.items()}
    with fst.safe_open(path) as file:

        def work() -> None:
            for _ in range(5):
                for name, bits in expected.items():
                    tensor = file.get_tensor(name)
                    assert bits_of(tensor) == bits
                    tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).zero_()
                part = file.get_slice("I32.weight")[::2, 1:3]
                assert_same(part, TENSORS["I32.weight"].tensor()[::2, 1:3])

        run_threads(work, 8)


def test_forked_child_shares_file(path):
    with fst.safe_open(path) as file:
        file.get_tensor("F32.weight")

        def use() -> None:
            assert_same(file.get_tensor("F32.weight"), TENSORS["F32.weight"].tensor())
            assert_same(file.get_slice("I32.weight")[:, 1], TENSORS["I32.weight"].tensor()[:, 1])

        run_in_fork(use)


def test_meta_device(path):
    with fst.safe_open(path, device="meta") as file:
        assert file.get_tensor("F32.weight").is_meta
        part = file.get_slice("F32.weight")[::2, None, [0, 2]]
        assert (part.device.type, part.shape) == ("meta", (2, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", 0, "cuda:0", torch.device("cuda", 0)], ids=str)
def test_gpu(path, device):
    with fst.safe_open(path, device=device) as file:
        for loaded in ({name: file.get_tensor(name) for name in TENSORS}, file.get_tensors()):
            assert {tensor.device for tensor in loaded.values()} == {torch.device("cuda", 0)}
            assert_all_same(loaded, TENSORS)
