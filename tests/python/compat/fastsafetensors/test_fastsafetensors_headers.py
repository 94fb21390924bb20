"""Headers of `fst.compat.fastsafetensors`: files and open files."""

import json
import os
from pathlib import Path

import pytest
import torch

import fst
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.frameworks import get_framework_op
from fst.compat.fastsafetensors.st_types import DType

pytestmark = pytest.mark.usefixtures("directory")


def test_metadata():
    metadata = compat.SafeTensorsMetadata.from_file("b.safetensors", get_framework_op("pytorch"))
    content = Path("b.safetensors").read_bytes()
    assert metadata.ser == json.loads(content[8 : metadata.header_length])
    assert metadata.aligned is (metadata.header_length % 16 == 0)
    assert metadata.framework.get_name() == "pytorch"
    assert metadata.size_bytes == len(content)
    assert metadata.header_length == 8 + int.from_bytes(content[:8], "little")
    assert metadata.metadata == {}
    frame = metadata.tensors["b1"]
    assert (frame.dtype, frame.shape, frame.strides) == (DType.I64, [2, 3], [3, 1])
    begin, end = (metadata.header_length + offset for offset in frame.data_offsets)
    assert content[begin:end] == torch.arange(6).numpy().tobytes()


def from_fd(path):
    with open(path, "rb") as file:
        os.unlink(path)
        file.seek(5)
        metadata = compat.SafeTensorsMetadata.from_fd(file.fileno(), "name", get_framework_op("pytorch"), True)
        assert file.tell() == 5
        return metadata


def test_headers_of_open_files():
    expected = compat.SafeTensorsMetadata.from_file("b.safetensors")
    Path("damaged.safetensors").write_bytes(Path("a.safetensors").read_bytes().replace(b"F16", b"F99"))
    metadata = from_fd("b.safetensors")
    assert metadata.src == "name"
    metadata.src = expected.src
    assert metadata == expected
    with pytest.raises(fst.SafetensorError, match=r"^name: .*F99"):
        from_fd("damaged.safetensors")


def test_frames_from_json():
    entry = {"dtype": "BF16", "shape": [2, 3, 4], "data_offsets": [8, 56]}
    frame = compat.TensorFrame.from_buffer(entry)
    assert frame == compat.TensorFrame(DType.BF16, [2, 3, 4], [8, 56])
    assert frame.strides == [12, 4, 1]
    for shape in ([-1], [2.0], [True], "22"):
        with pytest.raises(ValueError, match="nonnegative integers"):
            compat.TensorFrame.from_buffer(entry | {"shape": shape})
