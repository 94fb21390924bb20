"""Headers of files."""

from collections.abc import Callable
from dataclasses import dataclass

from fst._core.arguments import Path, path_of
from fst._core.dtypes import shape_in_torch
from fst.compat._header import read_header
from fst.compat.fastsafetensors.frameworks import Framework
from fst.compat.fastsafetensors.st_types import DType


@dataclass
class TensorFrame:
    """Header entry of a tensor. `data_offsets` count from the first byte of all tensors of the file."""

    dtype: DType
    shape: list[int]
    data_offsets: list[int]

    @property
    def torch_shape(self) -> list[int]:
        """Shape of the PyTorch tensor, which packs two F4 numbers into one element."""
        return shape_in_torch(self.dtype.value, self.shape)

    @property
    def strides(self) -> list[int]:
        """Distance between neighboring elements of each dimension, in elements."""
        strides: list[int] = []
        stride = 1
        for size in reversed(self.shape):
            strides.insert(0, stride)
            stride *= size
        return strides


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

    @classmethod
    def from_file(cls, filename: Path, framework: Framework | None = None) -> "SafeTensorsMetadata":
        """Reads and checks the header of a file. `framework` has no effect.

        Raises:
            IsADirectoryError: The path is a directory or an index file, which stand for several files.
            Errors of `fst.load_file` for paths and headers.
        """
        metadata, entries, header_bytes = read_header(filename)
        tensors = {
            name: TensorFrame(DType(entry["dtype"]), entry["shape"], entry["data_offsets"])
            for name, entry in entries.items()
        }
        data_bytes = max((frame.data_offsets[1] for frame in tensors.values()), default=0)
        return cls(path_of(filename), metadata or {}, tensors, header_bytes, header_bytes + data_bytes)

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
