"""The functions of `safetensors.torch`, over fst: change the import, keep the program.

Signatures, results and errors are theirs, and so are the files. Where fst does better, it says so; see
docs/coming-from-safetensors.md.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from fst import _safetensors_api as api
from fst._checkpoint.safe_open import safe_open
from fst._core.arguments import metadata_of, names_of, path_of
from fst._core.errors import SafetensorError
from fst._safetensors_api import safetensors_errors
from fst._save.aliasing import alias_groups, storage_ptr, storage_size
from fst._save.save import write_file
from fst._save.serialize import serialize

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


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, backend: str = "mmap"
) -> dict[str, Tensor]:
    """Loads every tensor of a file.

    Args:
        filename: A file; or a directory or an index, as for `fst.load_file`.
        device: Where the tensors go.
        backend: "mmap" or "pread". It changes nothing: fst finds the best way itself.

    Returns:
        The tensors by name, in the order of their bytes in the file.

    Raises:
        FileNotFoundError, OSError: What the operating system says.
        SafetensorError: The file is malformed, holds a dtype that PyTorch lacks, or an argument is not valid.

    Example:
        >>> import fst.torch
        >>> fst.torch.load_file("model.safetensors")["bias"]
        tensor([0., 0., 0., 0.])
    """
    return api.load_file(filename, "pt", device, backend)


def load(data: bytes) -> dict[str, Tensor]:
    """Loads every tensor of a file that is in memory.

    Args:
        data: The bytes of the file. They are copied; the tensors do not change with them.

    Returns:
        The tensors by name, on the CPU, in the order of their bytes in the file.

    Raises:
        SafetensorError: The bytes are malformed, or hold a dtype that PyTorch lacks.

    Example:
        >>> import fst.torch
        >>> fst.torch.load(fst.torch.save({"a": torch.arange(3)}))
        {'a': tensor([0, 1, 2])}
    """
    return api.load(data, "pt")


def save_file(
    tensors: dict[str, Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Saves tensors in a file, which has its name once it is whole.

    Args:
        tensors: Dense, contiguous tensors by name, on any devices.
        filename: The file.
        metadata: Free text for the header.

    Raises:
        ValueError: `tensors` is no dict of tensors, or one is sparse or not contiguous.
        RuntimeError: Tensors share memory; the message has their names.
        NotImplementedError: A tensor is on meta and has no data.
        SafetensorError: A dtype that safetensors lacks, a name that is reserved, or a file that cannot be written; the
            error of the operating system is its cause.

    Example:
        >>> import fst.torch
        >>> fst.torch.save_file({"a": torch.arange(3)}, "new.safetensors", metadata={"format": "pt"})
    """
    _check(tensors)
    _write(tensors, filename, metadata)


def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors.

    Args:
        tensors: As in `save_file`.
        metadata: As in `save_file`.

    Returns:
        The whole file.

    Raises:
        The errors of `save_file`, but for those of the operating system.

    Example:
        >>> import fst.torch
        >>> len(fst.torch.save({"a": torch.zeros(4)}))
        80
    """
    _check(tensors)
    names_of(list(tensors))
    return serialize(tensors, metadata_of(metadata))


def save_model(
    model: torch.nn.Module, filename: str, metadata: dict[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Saves a module, and of tensors that share memory only one.

    Args:
        model: The module.
        filename: The file.
        metadata: Free text for the header. For each name that is left out an entry is added, with the name that stands
            for it, unless there is one of this key already.
        force_contiguous: Saves contiguous copies of tensors that are not contiguous, rather than refuse them.

    Raises:
        RuntimeError: Tensors share memory of which none is the whole, so that a file of any would not do.
        And the errors of `save_file`.

    Example:
        >>> import fst.torch
        >>> fst.torch.save_model(torch.nn.Linear(2, 3), "linear.safetensors")
        >>> fst.tensor_names("linear.safetensors")
        ['bias', 'weight']
    """
    state = model.state_dict()
    texts = metadata_of(metadata)
    for kept, dropped in _left_out(state, ()).items():
        for name in dropped:
            texts = {name: kept} | (texts or {})
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        _check(state)
    except ValueError as error:
        raise ValueError(f"{error} Or let save_model(..., force_contiguous=True) do so.") from None
    _write(state, filename, texts)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file of `save_model` into a module; names that were left out there are not missed.

    Args:
        model: The module, whose parameters and buffers keep their places.
        filename: The file.
        strict: Whether a name that is missing or unexpected is an error.
        device: Where the file is loaded to, before its values are copied into the module.
        backend: As in `load_file`.

    Returns:
        The names in the module that the file lacks, and the names in the file that the module lacks.

    Raises:
        RuntimeError: Names are missing or unexpected, and `strict`; or shapes differ. The module has been written to.
        And the errors of `load_file`.

    Example:
        >>> import fst.torch
        >>> fst.torch.load_model(torch.nn.Linear(3, 4), "model.safetensors")
        (set(), [])
    """
    loaded = load_file(filename, device, backend=backend)
    left_out = _left_out(model.state_dict(), loaded)
    incompatible = model.load_state_dict(loaded, strict=False)
    missing, unexpected = set(incompatible.missing_keys), list(incompatible.unexpected_keys)
    for dropped in left_out.values():
        # One that is in the file all the same was loaded twice, and the second values are those that count.
        unexpected += [name for name in dropped if name not in missing]
        missing -= set(dropped)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"    {kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in sorted(names)))
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _check(tensors: dict[str, Tensor]) -> None:
    """Raises what safetensors raises for tensors that it does not save."""
    if not isinstance(tensors, dict):
        raise ValueError(f"tensors must be a dict of str to torch.Tensor, not {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f'tensor "{name}": expected a torch.Tensor, not {type(tensor).__name__}')
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(f"sparse tensors cannot be saved: {sparse}; make them dense first, with `.to_dense()`")
    shared = [sorted(group) for group in alias_groups(tensors) if len(group) > 1]
    if shared:
        raise RuntimeError(
            f"these tensors share memory: {shared}. A file would hold each apart, and so would what is loaded; save "
            "one of each group, or the module with `save_model`"
        )
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f'tensor "{name}" is not contiguous; save what `.contiguous()` makes of it.')
        if tensor.is_meta:
            raise NotImplementedError(f'tensor "{name}" is on meta and has no data to save')


def _write(tensors: dict[str, Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None) -> None:
    path, texts = path_of(filename), metadata_of(metadata)
    names_of(list(tensors))
    with safetensors_errors(OSError):
        write_file(tensors, path, texts)


def _left_out(tensors: dict[str, Tensor], preferred: Iterable[str]) -> dict[str, list[str]]:
    """Of each group that shares memory the name that stands for it, of `preferred` if one is, and the other names."""
    left_out: dict[str, list[str]] = {}
    for group in alias_groups(tensors):
        whole = {name for name in group if _is_whole(tensors[name])}
        if not whole:
            raise RuntimeError(
                f"none of the tensors {sorted(group)} is all of the memory that it is a view of, so no name can stand "
                "for them in a file; save clones"
            )
        kept = min(whole.intersection(preferred) or whole)
        if len(group) > 1:
            left_out[kept] = sorted(group - {kept})
    return left_out


def _is_whole(tensor: Tensor) -> bool:
    return tensor.data_ptr() == storage_ptr(tensor) and tensor.nbytes == storage_size(tensor)
