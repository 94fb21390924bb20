"""Headers of files."""

import ctypes
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fst._core.arguments import Path, path_of
from fst._core.dtypes import shape_in_torch
from fst._core.errors import SafetensorError
from fst.compat._header import header_entry, read_header
from fst.compat.fastsafetensors.frameworks import FrameworkOpBase, get_framework_op
from fst.compat.fastsafetensors.st_types import DType

# Upper bound of the format for the length of the JSON in a header.
_HEADER_BYTES_MAX = 100_000_000


@dataclass
class TensorFrame:
    """Header entry of a tensor, or of a region of it.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor or region.
        data_offsets: Begin and end of the tensor, counted from the first byte of all tensors of the file. A region has
            those of its tensor.
        strides: Distance between neighboring elements of each dimension, in elements.
        offsets: First index of the region in each dimension of the tensor.
        sliced: Whether the frame is a region.
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool
    # Distance between neighboring indices of the region in each dimension of the tensor, or None for 1.
    _steps: list[int] | None = field(default=None, repr=False, compare=False)

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
        strides: list[int] = []
        stride = 1
        for size in reversed(shape):
            strides.insert(0, stride)
            stride *= size
        return cls(DType(entry["dtype"]), shape, list(entry["data_offsets"]), strides, [0] * len(shape), False)

    @property
    def torch_shape(self) -> list[int]:
        """Shape of the PyTorch tensor, which packs two F4 numbers into one element."""
        return shape_in_torch(self.dtype.value, self.shape)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> "TensorFrame":
        """Returns the frame of a region. An integer keeps its dimension, with the length 1. No data is read.

        A region without elements has the shape [], and no strides and offsets, as in fastsafetensors.

        Raises:
            IndexError: There are more indices than dimensions, or an integer is out of range.
            TypeError: An index is neither an integer nor a slice.
            ValueError: The step of a slice is 0.
        """
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > len(self.shape):
            raise IndexError(f"{len(indices)} indices for a tensor of the shape {self.shape}")
        ranges = [range(size) for size in self.shape]
        for dim, (selected, one) in enumerate(zip(ranges, indices, strict=False)):
            if isinstance(one, slice):
                ranges[dim] = selected[one]
                continue
            try:
                first = selected[operator.index(one)]
            except IndexError:
                raise IndexError(f"index {one} of dimension {dim} is out of range for the shape {self.shape}") from None
            ranges[dim] = range(first, first + 1)
        if any(len(selected) == 0 for selected in ranges[: len(indices)]):
            return TensorFrame(self.dtype, [], self.data_offsets, [], [], False)
        old_steps = self._steps or [1] * len(self.shape)
        return TensorFrame(
            self.dtype,
            [len(selected) for selected in ranges],
            self.data_offsets,
            [stride * selected.step for stride, selected in zip(self.strides, ranges, strict=True)],
            [
                offset + step * selected.start
                for offset, step, selected in zip(self.offsets, old_steps, ranges, strict=True)
            ],
            True,
            [step * selected.step for step, selected in zip(old_steps, ranges, strict=True)],
        )


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

    @classmethod
    def from_buffer(
        cls, buf: int, buffer_len: int, filename: Path, framework: FrameworkOpBase | None = None
    ) -> "SafeTensorsMetadata":
        """Reads and checks the header of a file in memory. The data of the tensors is not read.

        Args:
            buf: Address of the first byte.
            buffer_len: Size of the file in bytes.
            filename: Path for `src` and for errors.
            framework: No effect.

        Raises:
            SafetensorError: The header is not valid.
        """
        # The first bytes of a file are the length of the JSON. `from_fd` refuses a length that is not valid.
        header_bytes = min(8, buffer_len)
        length = int.from_bytes(ctypes.string_at(buf, header_bytes), "little")
        if length <= min(_HEADER_BYTES_MAX, buffer_len - 8):
            header_bytes += length
        # A file with this header and a hole as long as the data.
        with open(os.memfd_create("header"), "wb") as file:
            file.write(ctypes.string_at(buf, header_bytes))
            file.truncate(buffer_len)
            return cls.from_fd(file.fileno(), filename)

    def select_byte_ranges(self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096) -> list[tuple[int, int]]:
        """Returns the byte ranges of the tensors that `keep_tensor` selects. Gaps of up to `merge_gap` are included."""
        ranges: list[tuple[int, int]] = []
        for name, frame in self.tensors.items():
            begin, end = (self.header_length + offset for offset in frame.data_offsets)
            if begin == end or not keep_tensor(name):
                continue
            if ranges and begin - ranges[-1][1] <= merge_gap:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((begin, end))
        return ranges
