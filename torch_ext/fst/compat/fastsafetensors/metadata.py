"""What the header of a file says."""

from collections.abc import Callable
from dataclasses import dataclass

from fst._core.arguments import Path, path_of
from fst._core.dtypes import shape_in_torch
from fst.compat._header import read_header
from fst.compat.fastsafetensors.frameworks import Framework
from fst.compat.fastsafetensors.st_types import DType


@dataclass
class TensorFrame:
    """A tensor of a file; `data_offsets` count from the first byte of all its tensors."""

    dtype: DType
    shape: list[int]
    data_offsets: list[int]

    @property
    def torch_shape(self) -> list[int]:
        """The shape of PyTorch's tensor, where two elements of F4 are one."""
        return shape_in_torch(self.dtype.value, self.shape)

    @property
    def strides(self) -> list[int]:
        """How many elements lie between neighbours of each dimension."""
        strides: list[int] = []
        stride = 1
        for size in reversed(self.shape):
            strides.insert(0, stride)
            stride *= size
        return strides


@dataclass
class SafeTensorsMetadata:
    """A file; its tensors in the order of their bytes, which begin at `header_length`."""

    src: str
    metadata: dict[str, str]
    tensors: dict[str, TensorFrame]
    header_length: int
    size_bytes: int

    @classmethod
    def from_file(cls, filename: Path, framework: Framework | None = None) -> "SafeTensorsMetadata":
        """Reads and checks the header. `framework` changes nothing.

        Raises the errors of `fst.load_file` that concern paths and headers.
        """
        header = read_header(filename)
        tensors = {
            name: TensorFrame(DType(tensor.dtype), tensor.shape, list(header.data_offsets[name]))
            for name, tensor in header.tensors.items()
        }
        return cls(path_of(filename), header.metadata or {}, tensors, header.header_bytes, header.file_bytes)

    def select_byte_ranges(self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096) -> list[tuple[int, int]]:
        """The parts of the file that hold the tensors to keep, gaps of up to `merge_gap` bytes included."""
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
