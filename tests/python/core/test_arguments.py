"""Types of arguments that the public functions accept and reject."""

import inspect
from pathlib import Path

import pytest
import torch

import fst
from rawfile import assert_same, random_raw, write

RAW = random_raw("F32", (3, 4))


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "m.safetensors", {"w": RAW}, {"format": "pt"})


class PathLike:
    """An os.PathLike object."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


@pytest.mark.parametrize("kind", [str, Path, lambda path: PathLike(str(path))], ids=["str", "Path", "PathLike"])
def test_paths(path, kind):
    given = kind(path)
    assert_same(fst.load_file(given)["w"], RAW.tensor())
    assert fst.metadata(given) == {"format": "pt"}
    for paths in (given, [given], (given,)):
        assert_same(fst.load_files(paths)["w"], RAW.tensor())
        assert_same(fst.load_tensors(paths, ["w"])[0], RAW.tensor())
        assert_same(fst.load_slices(paths, ["w"], [0], [1], [2])[0], RAW.tensor()[1:3])
        assert fst.tensor_names(paths) == ["w"]
        out = torch.zeros(3, 4)
        fst.load_into(paths, ["w"], [out])
        assert_same(out, RAW.tensor())


@pytest.mark.parametrize(
    ("hip", "message"), [("6.4.1", 'built for ROCm 6.4.1, .* load to "cpu"'), (None, "built for the CPU only")]
)
def test_pytorch_that_was_not_built_for_cuda(path, monkeypatch, hip, message):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert_same(fst.load_file(path)["w"], RAW.tensor())
    assert fst.load_file(path, "meta")["w"].is_meta
    for device in ("cuda", "cuda:0", 0, torch.device("cuda")):
        for load in (fst.load_file, fst.stream, lambda path, device: fst.load_tensors(path, ["w"], device)):
            with pytest.raises(ValueError, match=f"^cuda.*{message}"):
                load(path, device)
    with pytest.raises(ValueError, match=message):
        fst.load_module(torch.nn.Linear(4, 3), path, device="cuda")


WRONG_PATHS = [b"m.safetensors", 3, None, 1.5, PathLike(b"m.safetensors"), {"m"}, object()]
WRONG_NAMES = ["w", b"w", ["w", 3], [None], None, {"w": 1}]
WRONG_NUMBERS = [0, "0", [0.0], [None], None]
ZEROS = torch.zeros(3, 4)
# Calls with the path of a file and a wrong value, the wrong values, and the argument that the error names.
WRONG_TYPES = {
    "load_file path": (lambda _, wrong: fst.load_file(wrong), [*WRONG_PATHS, ["m"], ("m",)], "path"),
    "load_files paths": (lambda _, wrong: fst.load_files(wrong), WRONG_PATHS, "path"),
    "load_files path": (lambda _, wrong: fst.load_files([wrong]), WRONG_PATHS, "path"),
    "load_tensors path": (lambda _, wrong: fst.load_tensors(wrong, ["w"]), WRONG_PATHS, "path"),
    "load_slices path": (lambda _, wrong: fst.load_slices([wrong], ["w"], [0], [0], [1]), WRONG_PATHS, "path"),
    "load_into path": (lambda _, wrong: fst.load_into(wrong, ["w"], [ZEROS]), WRONG_PATHS, "path"),
    "tensor_names path": (lambda _, wrong: fst.tensor_names(wrong), WRONG_PATHS, "path"),
    "metadata path": (lambda _, wrong: fst.metadata(wrong), [*WRONG_PATHS, ["m"], ("m",)], "path"),
    "load_tensors names": (fst.load_tensors, WRONG_NAMES, "names"),
    "load_slices names": (lambda path, wrong: fst.load_slices(path, wrong, [0], [0], [1]), WRONG_NAMES, "names"),
    "load_into names": (lambda path, wrong: fst.load_into(path, wrong, [ZEROS]), WRONG_NAMES, "names"),
    "dims": (lambda path, wrong: fst.load_slices(path, ["w"], wrong, [0], [1]), WRONG_NUMBERS, "dims"),
    "starts": (lambda path, wrong: fst.load_slices(path, ["w"], [0], wrong, [1]), WRONG_NUMBERS, "starts"),
    "lengths": (lambda path, wrong: fst.load_slices(path, ["w"], [0], [0], wrong), WRONG_NUMBERS, "lengths"),
    "out": (lambda path, wrong: fst.load_into(path, ["w"], wrong), [ZEROS, [None], [[1.0]], None], "out"),
    "device": (fst.load_file, [1.5, b"cpu", ["cpu"]], "device"),
    "dtype": (lambda path, wrong: fst.load_file(path, dtype=wrong), [float, 6], "dtype"),
    "dtype by position": (lambda path, wrong: fst.load_file(path, "cpu", wrong), [torch.float32], "positional"),
    # An iterator can be consumed only once.
    "iterator of paths": (lambda path, wrong: fst.load_files(wrong), [iter(["m"])], "list or tuple"),
    "iterator of names": (fst.load_tensors, [iter(["w"])], "list or tuple"),
    "iterator of tensors": (lambda path, wrong: fst.load_into(path, ["w"], wrong), [iter([ZEROS])], "list or tuple"),
}


def test_wrong_types(path):
    for call, values, message in WRONG_TYPES.values():
        for wrong in values:
            with pytest.raises(TypeError, match=message):
                call(path, wrong)


def test_text_that_the_system_refuses(path):
    # A str with surrogates cannot be encoded as UTF-8. Those from U+DC80 on stand for the bytes of a path.
    for call in (lambda: fst.load_file("\ud800"), lambda: fst.load_tensors(path, ["\udcff"])):
        with pytest.raises(ValueError, match="UTF-8"):
            call()
    with pytest.raises(ValueError, match=r"(?i)nul"):
        fst.load_file("model\0.safetensors")


def test_devices(path):
    for device in ("cpu", torch.device("cpu"), "cpu:0", None):
        assert fst.load_file(path, device)["w"].device.type == "cpu"
        assert fst.load_file(path, device=device)["w"].device.type == "cpu"
    with torch.device("meta"):
        assert fst.load_file(path, None)["w"].is_meta
        assert not fst.load_file(path)["w"].is_meta


def test_signatures():
    """Every function has types, and takes no keywords but its signature's."""
    for name in fst.__all__:
        function = getattr(fst, name)
        if not inspect.isfunction(function):
            continue
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not parameter.empty, name
            assert parameter.kind is not parameter.VAR_KEYWORD, name
        with pytest.raises(TypeError, match="divice"):
            function(**dict.fromkeys(signature.parameters), divice="cpu")
