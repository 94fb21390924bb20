"""Typed bindings of the operators `torch.ops.fst.*` that raise Python exceptions.

Each function has the parameters of its operator. The rest of the package calls these and `fst._core.loads`, and never
`torch.ops.fst`.
"""
# Operators have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fst._core.compile  # noqa: F401  (registers the operators, their fakes and their effects)
from fst._core.arguments import CastDtype, Device, device_of, dtype_arguments
from fst._core.dtypes import DTYPES, SCALAR_TYPES
from fst._core.errors import translates_errors
from fst._core.secret_key import EncryptionKey

_Device = torch.device | str


@translates_errors
def verify(paths: Sequence[str], verify: str = "digests") -> None:
    """Reads all data of a checkpoint, and compares their digests."""
    torch.ops.fst.verify(paths, verify)


@translates_errors
def save_file(
    tensors: Sequence[Tensor], names: Sequence[str], path: str, *, metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors in one file."""
    torch.ops.fst.save_file(tensors, names, path, metadata=metadata)


@translates_errors
def save_shard(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    path: str,
    metadata: dict[str, str] | None,
    permissions_from: str,
    key: EncryptionKey | None = None,
) -> None:
    """Saves tensors in one file. If it is new, it gets the permissions of `permissions_from`, unless that is empty."""
    core_key = None if key is None else key._object
    torch.ops.fst._save_shard(tensors, names, path, metadata, permissions_from, core_key)


@translates_errors
def call(method: str, request: Any) -> Any:
    """Calls a function of the core without tensors. rust/bridge/calls.rs has their names, requests and answers."""
    return json.loads(torch.ops.fst._call(method, json.dumps(request, ensure_ascii=False)))


@translates_errors
def requested_dtypes(names: Sequence[str], dtype: CastDtype) -> list[torch.dtype | None]:
    """Returns the dtype that `dtype` requests for each of all names, or None."""
    patterns = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    dtype_arguments(patterns)  # Refuses dtypes to which nothing is cast.
    requested = [None if each is None else SCALAR_TYPES[each] for each in patterns.values()]
    return [DTYPES.get(number) for number in call("requested_dtypes", [names, list(patterns), requested])]


@translates_errors
def reader(paths: Sequence[str], device: _Device = "cpu") -> str:
    """Returns the names of the readers that a load of these files would use, joined with "+", after their probes."""
    return torch.ops.fst.reader(paths, device)


@translates_errors
def encode_delta(
    names: Sequence[str],
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    encoding: str,
    checksum: str,
    old_files: Any,
    new_files: Any,
) -> tuple[list[Tensor], list[str]]:
    """Returns the frames of a delta from old to new tensors, and the checksums of the new ones.

    Both are empty for a tensor that does not change. Tensors on meta are read from the files of a checkpoint.
    """
    return torch.ops.fst._encode_delta(names, old, new, encoding, checksum, old_files, new_files)


@translates_errors
def version_of(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Returns the version that all tensors have, or `None` if they have none. Errors name them."""
    return torch.ops.fst.version_of([tensor for _, tensor in named], [name for name, _ in named])


@translates_errors
def set_version(tensors: Sequence[Tensor], version: str | None) -> None:
    """Sets the version of tensors."""
    torch.ops.fst.set_version(tensors, version)


@translates_errors
def load_bytes(file: Tensor) -> dict[str, Tensor]:
    """Copies all tensors of a file in memory, which is uint8 on the CPU."""
    return dict(zip(*torch.ops.fst._load_bytes(file), strict=True))


@translates_errors
def serialize(tensors: Sequence[Tensor], names: Sequence[str], *, metadata: dict[str, str] | None = None) -> Tensor:
    """Returns the bytes of the file that `save_file` would write, as uint8 on the CPU."""
    return torch.ops.fst.serialize(tensors, names, metadata=metadata)


@translates_errors
def warm_up(device: Device = "cuda") -> None:
    """Creates what the first load to a GPU would create: pinned host memory, streams and device kernels.

    The process keeps all of it for later loads. Creating it takes about 10 ms, for which a program may have time before
    its first load, while it waits for a request or a download. The pinned memory is as for a load of a large file in
    the page cache: 20 MiB with 16 threads, and at most `FST_STAGING_BYTES`.

    Calling it again changes nothing, except after `release_memory`, which gives everything back. A forked process needs
    a call of its own. Loads to the CPU need no preparation, and a call for the CPU does nothing.

    Args:
        device: As in `load_file`.

    Raises:
        ValueError: The device does not exist, or its current stream is captured into a CUDA graph.
        RuntimeError: The driver refuses.

    Example:
        >>> fst.warm_up("cpu")
    """
    torch.ops.fst.warm_up(device_of(device))


@translates_errors
def current_device(device: Device) -> torch.device:
    """Returns a device with its index: "cuda" is the current GPU. Raises the errors of a load to the device."""
    resolved = device_of(device)
    try:
        return torch.empty(0, device=resolved).device
    except (RuntimeError, AssertionError):
        warm_up(resolved)
        raise


@translates_errors
def release_memory() -> int:
    """Frees the pinned host memory that the process keeps between loads.

    Loads to a GPU copy bytes through pinned host memory. Allocating it takes longer than filling it, so the process
    keeps the memory of the last load, at most `FST_STAGING_BYTES` (256 MiB), for the next one. A program that has
    loaded everything can free it.

    Loads in progress keep the memory that they use. Tensors are not affected. The next load allocates new memory.

    Returns:
        The number of bytes of host memory that were freed.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> fst.release_memory() > 0
        True
        >>> fst.release_memory()
        0
    """
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
def dequantize(
    codes: Tensor, scales: Tensor, scheme: str, **options: Sequence[int] | Tensor | torch.dtype | None
) -> Tensor:
    """Returns the numbers of codes. The options are `block`, `global_scale`, `begin` and `dtype`."""
    return torch.ops.fst.dequantize(codes, scales, scheme, **options)


@translates_errors
def dequantize_into(
    codes: Tensor, scales: Tensor, out: Tensor, scheme: str, **options: Sequence[int] | Tensor | None
) -> None:
    """Writes the numbers of codes to `out`. The options are `block`, `global_scale` and `begin`."""
    torch.ops.fst.dequantize_into(codes, scales, out, scheme, **options)


@translates_errors
def quantize(tensor: Tensor, scheme: str, *, block: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of a tensor."""
    return torch.ops.fst.quantize(tensor, scheme, block=block)


@translates_errors
def profile_start() -> int:
    """Starts a profile, and returns its number."""
    return torch.ops.fst.profile_start()


@translates_errors
def profile_stop(profile: int) -> str:
    """Stops a profile, and returns its recording as JSON."""
    return torch.ops.fst.profile_stop(profile)


@translates_errors
def profile_totals() -> str:
    """Returns the totals of all loads and saves of the process as JSON."""
    return torch.ops.fst.profile_totals()
