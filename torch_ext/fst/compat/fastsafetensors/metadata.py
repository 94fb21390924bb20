"""Headers of files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fst._core.arguments import Path, path_of
from fst._core.dtypes import shape_in_torch
from fst._core.errors import SafetensorError
from fst.compat._header import header_entry, read_header
from fst.compat.fastsafetensors.frameworks import FrameworkOpBase, get_framework_op
from fst.compat.fastsafetensors.st_types import DType


@dataclass
class TensorFrame:
    """Header entry of a tensor.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        data_offsets: Begin and end of the tensor, counted from the first byte of all tensors of the file.
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]

    @classmethod
    def from_buffer(cls, entry: Mapping[str, Any]) -> "TensorFrame":
        """Converts an entry of a header's JSON.

        Raises:
            KeyError: A field is missing.
            ValueError: The dtype or the shape is not valid.
        """
        shape = entry["shape"]
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"shape must be a list of nonnegative integers, not {shape!r}")
        return cls(DType(entry["dtype"]), shape, list(entry["data_offsets"]))

    @property
    def strides(self) -> list[int]:
        """Distance between neighboring elements of each dimension, in elements."""
        return [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]

    @property
    def torch_shape(self) -> list[int]:
        """Shape of the PyTorch tensor, which packs two F4 numbers into one element."""
        return shape_in_torch(self.dtype.value, self.shape)


@dataclass
class SafeTensorsMetadata:
    """Header of a file.

    Attributes:
        src: Path of the file.
        metadata: Metadata of the file.
        tensors: Header entries by name, in the order of their bytes.
        header_length: Number of bytes before the data of the first tensor.
        size_bytes: Size of the file in bytes.
    """

    src: str
    metadata: dict[str, str]
    tensors: dict[str, TensorFrame]
    header_length: int
    size_bytes: int

    @property
    def framework(self) -> FrameworkOpBase:
        """PyTorch."""
        return get_framework_op("pytorch")

    @property
    def aligned(self) -> bool:
        """Whether the first tensor begins at a multiple of the alignment of pointers on GPUs."""
        return self.header_length % self.framework.get_device_ptr_align() == 0

    @property
    def ser(self) -> dict[str, dict[str, Any]]:
        """Header entries in the form of their JSON."""
        return {
            name: header_entry(frame.dtype.value, frame.shape, frame.data_offsets)
            for name, frame in self.tensors.items()
        }

    @classmethod
    def from_file(cls, filename: Path, framework: FrameworkOpBase | None = None) -> "SafeTensorsMetadata":
        """Reads and checks the header of a file. `framework` has no effect.

        Raises:
            IsADirectoryError: The path is a directory or an index file, which stand for several files.
            Errors of `fst.load_file` for paths and headers.
        """
        metadata, entries, header_bytes = read_header(filename)
        tensors = {name: TensorFrame.from_buffer(entry) for name, entry in entries.items()}
        data_bytes = max((frame.data_offsets[1] for frame in tensors.values()), default=0)
        return cls(path_of(filename), metadata or {}, tensors, header_bytes, header_bytes + data_bytes)

    @classmethod
    def from_fd(
        cls, fd: int, filename: Path, framework: FrameworkOpBase | None = None, keep_orig_dict: bool = False
    ) -> "SafeTensorsMetadata":
        """Reads and checks the header of an open file, from its first byte.

        Args:
            fd: File descriptor, whose position does not change.
            filename: Path for `src` and for errors.
            framework, keep_orig_dict: No effect.

        Raises:
            Errors of `from_file`.
        """
        source = f"/proc/self/fd/{fd}"
        try:
            metadata = cls.from_file(source)
        except SafetensorError as error:
            raise type(error)(str(error).replace(source, path_of(filename))) from None
        metadata.src = path_of(filename)
        return metadata
