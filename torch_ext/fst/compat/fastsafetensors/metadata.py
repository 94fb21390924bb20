"""Headers of files."""

from dataclasses import dataclass

from fst._core.arguments import Path, path_of
from fst._core.dtypes import shape_in_torch
from fst.compat._header import read_header
from fst.compat.fastsafetensors.st_types import DType


@dataclass
class TensorFrame:
    """Header entry of a tensor: its dtype and shape."""

    dtype: DType
    shape: list[int]

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
    """

    src: str
    metadata: dict[str, str]
    tensors: dict[str, TensorFrame]

    @classmethod
    def from_file(cls, filename: Path) -> "SafeTensorsMetadata":
        """Reads and checks the header of a file.

        Raises:
            IsADirectoryError: The path is a directory or an index file, which stand for several files.
            Errors of `fst.load_file` for paths and headers.
        """
        metadata, entries, _ = read_header(filename)
        tensors = {name: TensorFrame(DType(entry["dtype"]), entry["shape"]) for name, entry in entries.items()}
        return cls(path_of(filename), metadata or {}, tensors)
