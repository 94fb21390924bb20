"""Typed bindings of the operators `torch.ops.fst.*` that raise Python exceptions.

Each function has the parameters of its operator, except that regions and dtypes are not flattened. The rest of the
package calls these, and never `torch.ops.fst`.
"""
# Operators have no static types.
# mypy: disable-error-code="no-any-return"

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fst._core.compile  # noqa: F401  (registers the operators, their fakes and their effects)
from fst._core.arguments import Dtype, dtype_arguments
from fst._core.dtypes import DTYPES
from fst._core.errors import methods_translate_errors, translates_errors
from fst._core.index_range import IndexRange, flatten
from fst._core.verify import warn_of_unverified

_Device = torch.device | str


@methods_translate_errors
class OperatorLoads:
    """Loads by operators, which open the files in each call. The methods are those of an open checkpoint.

    Args:
        paths: Files, directories or index files.
        verify: Digests to compare, as `verify_of` returns them.
    """

    def __init__(self, paths: Sequence[str], verify: str = "") -> None:
        self._paths = paths
        self._verify = verify

    def load_files(self, device: _Device, dtype: Dtype = None) -> dict[str, Tensor]:
        """Loads all tensors."""
        return self._load(torch.ops.fst.load_files, device, dtype=dtype)

    def load_tensors(self, names: Sequence[str], device: _Device, dtype: Dtype = None) -> list[Tensor]:
        """Loads named tensors."""
        return self._load(torch.ops.fst.load_tensors, names, device, dtype=dtype)

    def load_slices(
        self,
        names: Sequence[str],
        dims: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: _Device,
        dtype: Dtype = None,
    ) -> list[Tensor]:
        """Loads a slice along one dimension of each named tensor."""
        return self._load(torch.ops.fst.load_slices, names, dims, starts, lengths, device, dtype=dtype)

    def load_boxes(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], device: _Device, dtype: Dtype = None
    ) -> list[Tensor]:
        """Loads an index region of each named tensor."""
        return self._load(torch.ops.fst.load_boxes, names, *flatten(regions), device, dtype=dtype)

    def overwrite(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """Overwrites existing tensors with named tensors."""
        torch.ops.fst.load_into(self._paths, names, out, verify=self._verify)
        warn_of_unverified(self._verify)

    def _load(self, operator: Any, *own: Any, dtype: Dtype) -> Any:
        loaded = operator(self._paths, *own, verify=self._verify, **dtype_arguments(dtype))
        warn_of_unverified(self._verify)
        return loaded


@translates_errors
def verify(paths: Sequence[str], verify: str = "digests") -> None:
    """Reads all data of a checkpoint, and compares their digests."""
    torch.ops.fst.verify(paths, verify)


@translates_errors
def verify_files(manifest: str, directory: str) -> int:
    """Compares all files of a manifest, and returns their number."""
    return torch.ops.fst._verify_files(manifest, directory)


@translates_errors
def verify_model(request: str, path: str) -> int:
    """Verifies the signature of a model, compares all files with it, and returns their number."""
    return torch.ops.fst._verify_model(request, path)


@translates_errors
def model_statement(request: str, path: str) -> str:
    """Hashes all files of a model, and returns the statement about them, for a new signature."""
    return torch.ops.fst._model_statement(request, path)


@translates_errors
def save_file(
    tensors: Sequence[Tensor], names: Sequence[str], path: str, *, metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors in one file."""
    torch.ops.fst.save_file(tensors, names, path, metadata=metadata)


@translates_errors
def save_shard(
    tensors: Sequence[Tensor], names: Sequence[str], path: str, metadata: dict[str, str] | None, model: str
) -> None:
    """Saves tensors in one file. If it is new, it gets the owner and permissions of the file `model`, unless empty."""
    torch.ops.fst._save_shard(tensors, names, path, metadata, model)


@translates_errors
def write_bytes(bytes: Tensor, path: str, model: str) -> None:
    """Writes a file of bytes like `save_shard`."""
    torch.ops.fst._write_bytes(bytes, path, model)


@translates_errors
def check_target(path: str) -> None:
    """Raises the error of a save to `path` if that is not the path of a new file or of a writable regular file.

    Sends no request to check the URL of an object.
    """
    torch.ops.fst._check_target(path)


@translates_errors
def link_file(source: str, path: str) -> None:
    """Gives a complete file a second name, and replaces a file of this name. Without hard links, renames the file."""
    torch.ops.fst._link_file(source, path)


@translates_errors
def names_beside(url: str) -> list[str]:
    """Returns the names of the objects beside an object of a remote store."""
    return list(torch.ops.fst._names_beside(url))


@translates_errors
def remove_object(url: str) -> None:
    """Removes an object of a remote store. It need not exist."""
    torch.ops.fst._remove_object(url)


@translates_errors
def requested_dtypes(names: Sequence[str], dtype: Dtype) -> list[torch.dtype | None]:
    """Returns the dtype that `dtype` requests for each of all names, or None."""
    patterns = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    arguments = dtype_arguments(patterns)
    numbers = torch.ops.fst._requested_dtypes(names, arguments["patterns"], arguments["dtypes"])
    return [DTYPES.get(number) for number in numbers]


@translates_errors
def reader(paths: Sequence[str], device: _Device = "cpu") -> str:
    """Returns the names of the readers that a load of these files would use, joined with "+", after their probes."""
    return torch.ops.fst.reader(paths, device)


@translates_errors
def checkpoint_files(paths: Sequence[str]) -> list[str]:
    """Lists the files that paths of files, directories and index files stand for. Opens only index files."""
    return torch.ops.fst._checkpoint_files(paths)


@translates_errors
def serialize(tensors: Sequence[Tensor], names: Sequence[str], *, metadata: dict[str, str] | None = None) -> Tensor:
    """Returns the bytes of the file that `save_file` would write, as uint8 on the CPU."""
    return torch.ops.fst.serialize(tensors, names, metadata=metadata)


@translates_errors
def prepare(device: torch.device | str) -> None:
    """Makes ready what large loads to a GPU need, and what the process keeps between loads."""
    torch.ops.fst.prepare(device)


@translates_errors
def release_memory() -> int:
    """Frees the staging memory that the process keeps between loads, and returns its size in bytes."""
    return torch.ops.fst.release_memory()


@translates_errors
def wait_for_event(event: torch.cuda.Event) -> None:
    """Waits for a recorded event. `Event.synchronize` would end the captures of CUDA graphs on other threads."""
    torch.ops.fst._wait_for_event(event.cuda_event, event.device)


@translates_errors
def configure_storage(url: str, names: Sequence[str], values: Sequence[str]) -> None:
    """Sets options of the URLs that begin with `url`."""
    torch.ops.fst.configure_storage(url, names, values)


@translates_errors
def cast(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """Casts tensors to a floating-point dtype."""
    return torch.ops.fst.cast(tensors, dtype=dtype)


@translates_errors
def scatter(
    bytes: Tensor,
    offsets: Sequence[int],
    dtypes: Sequence[int],
    sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Copies tensors out of a tensor of raw bytes. `sizes` holds all shapes one after the other, `ranks` their lengths.

    `dtypes` holds the numbers of `fst._core.dtypes.SCALAR_TYPES`.
    """
    return torch.ops.fst.scatter(bytes, offsets, dtypes, sizes, ranks, dtype=dtype)


@translates_errors
def profile_start() -> int:
    """Starts a profile, and returns its number."""
    return torch.ops.fst.profile_start()


@translates_errors
def profile_stop(profile: int) -> str:
    """Stops a profile, and returns its recording as JSON."""
    return torch.ops.fst.profile_stop(profile)
