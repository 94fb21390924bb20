"""Drop-in replacement of `safetensors.torch`: change the import, keep the program.

Signatures, results, exceptions and files are the same. docs/coming-from-safetensors.md lists the differences.
"""

import os
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fst import _safetensors_api as api
from fst._checkpoint.safe_open import safe_open
from fst._core import errors
from fst._core.arguments import check_kind, metadata_of, names_of, path_of
from fst._core.errors import SafetensorError
from fst._module.match import wrapped_names
from fst._safetensors_api import safetensors_errors
from fst._save.aliasing import alias_groups, shared_groups, storage_ptr, storage_size
from fst._save.check import check_values
from fst._save.save import write_file

__all__ = [
    "SafetensorError",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]


if not TYPE_CHECKING:
    SafetensorError = errors.LibraryError

    def __getattr__(name):
        """Returns other names of `safetensors.torch`, such as `serialize`, if safetensors is installed."""
        return api.library_attribute(__name__, "safetensors.torch", name)


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, backend: str = "mmap"
) -> dict[str, Tensor]:
    """Loads every tensor of a file.

    Args:
        filename: A file, or a directory or index file as in `fst.load_file`.
        device: The device of the tensors.
        backend: "mmap" or "pread". It has no effect: fst chooses the reader itself.

    Returns:
        The tensors by name, in the order of their bytes in the file.

    Raises:
        FileNotFoundError, OSError: The operating system reported an error.
        SafetensorError: The file is malformed, PyTorch has no dtype for a tensor, or an argument is invalid.

    Example:
        >>> import fst.torch
        >>> fst.torch.load_file("model.safetensors")["bias"]
        tensor([0., 0., 0., 0.])
    """
    return api.load_file(filename, "pt", device, backend)


def load(data: bytes) -> dict[str, Tensor]:
    """Loads every tensor of a file in memory.

    Args:
        data: The bytes of the file. They are copied, so later changes to them do not affect the tensors.

    Returns:
        The tensors by name, on the CPU, in the order of their bytes in the file.

    Raises:
        SafetensorError: The bytes are malformed, or PyTorch has no dtype for a tensor.

    Example:
        >>> import fst.torch
        >>> fst.torch.load(fst.torch.save({"a": torch.arange(3)}))
        {'a': tensor([0, 1, 2])}
    """
    return api.load(data, "pt")


def save_file(
    tensors: dict[str, Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors in a file, which is renamed to its path once it is complete.

    Args:
        tensors: Dense, contiguous tensors by name, on any devices.
        filename: The file.
        metadata: Text for the header.

    Raises:
        ValueError: `tensors` is not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: Tensors share memory. The message lists their names.
        NotImplementedError: A tensor is on meta and has no data.
        SafetensorError: The format has no dtype for a tensor, a name is reserved, or the file cannot be written. In the
            last case, the exception's cause is the error of the operating system.

    Example:
        >>> import fst.torch
        >>> fst.torch.save_file({"a": torch.arange(3)}, "new.safetensors", metadata={"format": "pt"})
    """
    _check(tensors)
    _write(tensors, filename, metadata)


def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file with these tensors.

    Args:
        tensors, metadata: As in `save_file`.

    Returns:
        The whole file.

    Raises:
        The errors of `save_file`, except errors of the operating system.

    Example:
        >>> import fst.torch
        >>> len(fst.torch.save({"a": torch.zeros(4)}))
        80
    """
    _check(tensors)
    names_of(list(tensors))
    return api.save(tensors, metadata_of(metadata))


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Saves the state of a module. Of tensors that share memory, it saves only one.

    Args:
        model: The module.
        filename: The file.
        metadata: Text for the header. For each name that is left out, the header gets an entry that maps it to the
            saved name, unless the metadata already has this key.
        force_contiguous: Saves contiguous copies of non-contiguous tensors instead of raising an error.

    Raises:
        RuntimeError: Tensors share memory, and none of them covers all of it, so no single one can be saved.
        And the errors of `save_file`.

    Example:
        >>> import fst.torch
        >>> fst.torch.save_model(torch.nn.Linear(2, 3), "linear.safetensors")
        >>> fst.tensor_names("linear.safetensors")
        ['bias', 'weight']
    """
    state = _state_dict(model)
    check_values(state, f"{type(model).__name__}.state_dict()")
    # Sparse tensors have no storage, which the search for shared memory would need.
    _check_dense(state)
    file_metadata = metadata_of(metadata)
    for kept, dropped in _left_out(state, ()).items():
        for name in dropped:
            file_metadata = {name: kept} | (file_metadata or {})
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    _check(state, " Or use save_model(..., force_contiguous=True).")
    _write(state, filename, file_metadata)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file of `save_model` into a module. Names that `save_model` left out do not count as missing.

    Args:
        model: The module. The addresses of its parameters and buffers do not change.
        filename: The file.
        strict: Whether missing and unexpected names raise an error.
        device: The device to which the file is loaded before its values are copied into the module.
        backend: As in `load_file`.

    Returns:
        The names in the module that are missing in the file, and the names in the file that the module does not have.

    Raises:
        RuntimeError: Names are missing or unexpected and `strict` is True, or shapes differ. The module has already
            been changed.
        And the errors of `load_file`.

    Example:
        >>> import fst.torch
        >>> fst.torch.load_model(torch.nn.Linear(3, 4), "model.safetensors")
        (set(), [])
    """
    _check_module(model)
    loaded = load_file(filename, device, backend=backend)
    left_out = _left_out(_state_dict(model), loaded)
    incompatible = model.load_state_dict(loaded, strict=False)
    missing, unexpected = set(incompatible.missing_keys), list(incompatible.unexpected_keys)
    for dropped in left_out.values():
        # A left-out name in the file was copied to the shared memory, too. The values of the later copy remain.
        unexpected += [name for name in dropped if name not in missing]
        missing -= set(dropped)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"    {kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in sorted(names)))
        lines += [f"    {problem}" for problem in wrapped_names(sorted(missing), unexpected, "module")[0]]
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _check(tensors: dict[str, Tensor], other_remedy: str = "") -> None:
    """Raises the errors of safetensors for tensors that it does not save.

    Args:
        tensors: The tensors by name.
        other_remedy: Sentence for the error of tensors that are not contiguous.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
    _check_dense(tensors)
    shared = shared_groups(tensors)
    if shared:
        raise RuntimeError(
            f"Some tensors share memory: {shared}. A file would store a copy of each, and a load would return "
            "separate tensors. Save one tensor of each group, or the module with `save_model`"
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. Save its "
                f"`.contiguous()` copy.{other_remedy}"
            )
        if tensor.is_meta:
            raise NotImplementedError(f'Cannot copy out of meta tensor; no data! Tensor "{name}" is on meta')


def _check_module(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}; the model comes before the path")


def _state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the state of a module. Raises an error for tensors of which PyTorch returns none in words."""
    _check_module(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        check_kind(name, tensor)
    return model.state_dict()


def _check_dense(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        check_kind(name, tensor)
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You can make it "
            "a dense tensor before saving with `.to_dense()` but be aware this might make a much larger file than "
            "needed."
        )


def _write(tensors: dict[str, Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None) -> None:
    path, file_metadata = path_of(filename), metadata_of(metadata)
    names_of(list(tensors))
    with safetensors_errors(OSError):
        write_file(tensors, path, file_metadata)


def _left_out(tensors: dict[str, Tensor], preferred: Iterable[str]) -> dict[str, list[str]]:
    """Maps the name to save of each group that shares memory to its other names. Names in `preferred` come first."""
    left_out: dict[str, list[str]] = {}
    for group in alias_groups(tensors):
        whole = {name for name in group if _is_whole(tensors[name])}
        if not whole:
            raise RuntimeError(
                f"The tensors {sorted(group)} view memory that none of them covers, so no single one can be saved for "
                "all. Save clones with `save_file`"
            )
        kept = min(whole.intersection(preferred) or whole)
        if len(group) > 1:
            left_out[kept] = sorted(group - {kept})
    return left_out


def _is_whole(tensor: Tensor) -> bool:
    return tensor.data_ptr() == storage_ptr(tensor) and tensor.nbytes == storage_size(tensor)
