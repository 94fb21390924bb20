"""An open checkpoint has the methods of safetensors' class, and they do the same."""

import pytest
import safetensors

import fst
from rawfile import DTYPES, Raw, assert_same, random_raw, write

TENSORS: dict[str, Raw] = {
    **{f"{dtype}.weight": random_raw(dtype, (3, 4)) for dtype in DTYPES},
    "a.scalar": random_raw("F32", ()),
    "z.empty": random_raw("F16", (0, 4)),
}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "model.safetensors", TENSORS, {"format": "pt", "who": "us"})


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_what_the_header_says(path, framework):
    with safetensors.safe_open(path, framework) as theirs, fst.safe_open(path, framework) as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118  (it is no dictionary)
            part, expected = ours.get_slice(name), theirs.get_slice(name)
            assert part.get_shape() == expected.get_shape()
            assert part.get_dtype() == expected.get_dtype()
            raw = TENSORS[name]
            assert ours.get_tensor_meta(name) == (raw.dtype, list(raw.shape), len(raw.data))


@pytest.mark.usefixtures("reader")
def test_tensors(path):
    with safetensors.safe_open(path, "pt") as theirs, fst.safe_open(path, "pt") as ours:
        everything = ours.get_tensors()
        assert list(everything) == list(theirs.get_tensors())
        for name in TENSORS:
            assert_same(ours.get_tensor(name), theirs.get_tensor(name))
            assert_same(everything[name], theirs.get_tensor(name))
