"""All loads return the same tensors with a key, with a progress bar and without both, and refuse the same arguments."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fst
from saved import KEY, flip_bit, registered

TENSORS = {
    "matrix": torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024),
    "scale": torch.tensor([0.5, 2.0]),
    "ids": torch.arange(7),
}
DTYPES = {"scale": None, "*": torch.bfloat16}
NAMES = ["ids", "matrix", "scale", "matrix"]
SLICES: dict[str, list[int]] = {"dims": [0, -1, 0, 0], "starts": [1, 1000, 0, 3], "lengths": [3, 24, 2, 0]}
BOXES = [[(1, 3, 2)], [(0, 1024, 1), (1000, 24, 1)], [(0, 2, 1)], [(3, 0, 1), (0, 1024, 1)]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("one path")
    fst.save_file(TENSORS, directory / "plain.safetensors")
    fst.save_file(TENSORS, directory / "key.safetensors", encryption_key=KEY)
    return {name: directory / f"{name}.safetensors" for name in ("plain", "key")}


def load_into(path: Path, **options: Any) -> list[torch.Tensor]:
    out = [torch.zeros_like(TENSORS[name]) for name in NAMES]
    fst.load_into(path, NAMES, out, **options)
    return out


LOADS: dict[str, Callable[..., Any]] = {
    "load_file": functools.partial(fst.load_file, dtype=DTYPES),
    "load_files": lambda path, **options: fst.load_files([path], dtype=DTYPES, **options),
    "load_tensors": functools.partial(fst.load_tensors, names=NAMES, dtype=DTYPES),
    "load_slices": functools.partial(fst.load_slices, names=NAMES, **SLICES, dtype=DTYPES),
    "load_boxes": functools.partial(fst.load_boxes, names=NAMES, boxes=BOXES, dtype=DTYPES),
    "load_into": load_into,
    "stream": lambda path, **options: dict(fst.stream(path, dtype=DTYPES, **options)),
}
WITH_BAR = ("load_file", "load_files", "load_tensors", "load_slices")


@pytest.mark.parametrize("name", LOADS)
def test_loads_return_the_same_bits(paths: dict[str, Path], name: str) -> None:
    load = LOADS[name]
    expected = load(paths["plain"])
    for tensor_name, tensor in expected.items() if isinstance(expected, dict) else zip(NAMES, expected, strict=True):
        is_cast = tensor_name == "matrix" and name != "load_into"
        assert tensor.dtype == (torch.bfloat16 if is_cast else TENSORS[tensor_name].dtype)
    others = [load(paths["key"], encryption_key=KEY), load(paths["key"], encryption_key=KEY, verify=True)]
    if name in WITH_BAR:
        others += [load(paths["plain"], progress=True), load(paths["key"], progress=True, encryption_key=KEY)]
    for other in others:
        if isinstance(expected, dict):
            assert other.keys() == expected.keys()
        torch.testing.assert_close(other, expected, rtol=0, atol=0)


def test_loads_refuse_the_same_arguments(paths: dict[str, Path]) -> None:
    """A key or a bar does not change which outputs and slices are errors. Nothing is written."""
    half = torch.zeros(2, dtype=torch.float16)
    for path, options in ((paths["plain"], {}), (paths["key"], {"encryption_key": KEY})):
        with pytest.raises(ValueError, match=r'"scale".*nothing was written'):
            fst.load_into(path, ["scale"], [half], **options)
        for progress in (False, True):
            for dim, start in ((1, 0), (-2, 0), (0, 2), (0, -1)):
                with pytest.raises(ValueError, match=f'{path.name}: tensor "scale"'):
                    fst.load_slices(path, ["scale"], [dim], [start], [1], progress=progress, **options)
    assert not half.any()


@pytest.mark.parametrize("options", [{}, {"encryption_key": KEY}], ids=["registered key", "key"])
def test_data_are_authenticated_before_writes(paths: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    """With `verify`, nothing is decrypted into the outputs before all data is authentic."""
    changed = Path(shutil.copy(paths["key"], tmp_path))
    flip_bit(changed, -1)
    out = [torch.zeros_like(tensor) for tensor in TENSORS.values()]
    with registered(), pytest.raises(fst.IntegrityError):
        fst.load_into(changed, list(TENSORS), out, verify=True, **options)
    assert not any(tensor.any() for tensor in out)
