"""Normalizes user arguments (paths, names, devices, dtypes, metadata) to operator arguments."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fst._core.dtypes import SCALAR_TYPES, dtype_named
from fst._core.sizes import parse_size
from fst._core.urls import is_collapsed, is_url

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
Device = torch.device | str | int | None
# Number of bytes, or a text such as "5GB".
Size = int | str
# Dtype to cast to: one for all tensors, or one for each name or pattern, with `None` for the stored dtype. Dtypes have
# names, such as "bf16" and "float16".
Dtype = torch.dtype | str | Mapping[str, torch.dtype | str | None] | None
# Result of `dtype_of`, without texts.
CastDtype = torch.dtype | Mapping[str, torch.dtype | None] | None
Digests = Literal["blake3", "sha256"] | None

# Key of the metadata under which a file carries digests, and with which a save requests them.
DIGESTS_KEY = "fst.digests"

# Default `window_bytes` of streams: upper bound for tensors that are loaded and not yet returned.
DEFAULT_WINDOW_BYTES = 512 << 20
# Default `exchange_bytes` of streams across ranks: size of a rank's send and receive buffers, beside the window.
DEFAULT_EXCHANGE_BYTES = 128 << 20

# Largest index of a device that PyTorch can store.
_LARGEST_DEVICE_INDEX = 127

# Number in place of a dtype for tensors that keep the stored one.
_STORED_DTYPE = -1

_Item = TypeVar("_Item")


def path_of(path: Path) -> str:
    """Returns a path or a URL as UTF-8 text. A path of other bytes becomes a `file://` URL with escapes."""
    # Classes with subclass hooks, such as os.PathLike and Mapping, are slow to check. The usual types come first.
    if isinstance(path, str):
        return _path_text(path)
    if not isinstance(path, os.PathLike):
        hint = "; load_files takes several" if isinstance(path, (list, tuple)) else ""
        raise TypeError(f"a path must be a str or an os.PathLike, not {type(path).__name__}{hint or _path_hint(path)}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be text, not {type(text).__name__}{_path_hint(text)}")
    if is_collapsed(text):
        scheme = text.partition(":")[0]
        raise ValueError(f"{scheme}:/...: pathlib removed a slash of this URL; pass the URL as a str")
    return _path_text(text)


def _path_hint(path: object) -> str:
    """Returns the end of the error for a value that is not a path."""
    if isinstance(path, bytes):
        return "; pass os.fsdecode(path)"
    return "; pass the path of the file, not the open file" if hasattr(path, "read") else ""


def _path_text(path: str) -> str:
    try:
        return _utf8(path)
    except ValueError:
        if is_url(path):
            raise
        # As `open` encodes it. Code points that stand for no byte are an error.
        with contextlib.suppress(UnicodeEncodeError):
            return f"file://{quote(os.path.abspath(os.fsencode(path)))}"
        raise


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} cannot be encoded as UTF-8") from None
    return text


def paths_of(paths: Paths) -> list[str]:
    """Returns one path or several as a list of texts."""
    if isinstance(paths, str) or isinstance(paths, os.PathLike):  # noqa: SIM101  (see `path_of`)
        return [path_of(paths)]
    if not isinstance(paths, (list, tuple)):
        raise TypeError(
            f"paths must be a path, or a list or tuple of paths, not {type(paths).__name__}{_path_hint(paths)}"
        )
    return [path_of(path) for path in paths]


def names_of(names: Sequence[str], argument: str = "names") -> list[str]:
    """Returns tensor names as a list. Errors call them `argument`."""
    return [_utf8(name) for name in list_of(names, str, argument)]


def list_of(values: Sequence[_Item], item: type[_Item], argument: str) -> list[_Item]:
    """Returns a list whose items all have the type `item`. Errors call it `argument`."""
    # A str would be taken for its characters, and a generator would be empty the second time.
    if not isinstance(values, (list, tuple)):
        hint = f"; pass [{argument}]" if isinstance(values, item) else ""
        hint = f"; pass list({argument}.values())" if isinstance(values, dict) and item is Tensor else hint
        raise TypeError(f"{argument} must be a list or tuple of {item.__name__}, not {type(values).__name__}{hint}")
    for value in values:
        if not isinstance(value, item):
            hint = "; torch.from_numpy shares its memory" if type(value).__name__ == "ndarray" else ""
            raise TypeError(f"{argument} must hold {item.__name__} only, not {type(value).__name__}{hint}")
    return list(values)


def size_of(size: Size, argument: str, least: int = 1) -> int:
    """Returns a number of bytes. Errors call it `argument`."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f'{argument} must be an int, a number of bytes, or a text such as "5GB", not {size!r}')
    try:
        size = size if isinstance(size, int) else parse_size(size)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
    if size < least:
        raise ValueError(f"{argument} is {size}, but must be at least {least}")
    return size


def device_of(device: Device) -> torch.device | str:
    """Returns a device. `None` is PyTorch's default device."""
    if device is None:
        return torch.get_default_device()
    if isinstance(device, int):
        _check_index("cuda", device)
        device = torch.device("cuda", device)
    if not isinstance(device, torch.device | str):
        raise TypeError(f"device must be a torch.device, str, int or None, not {type(device).__name__}")
    if isinstance(device, str) and not torch.compiler.is_compiling():
        _check_text(device)
    kind, _, index = str(device).partition(":")
    if index.isdecimal():
        _check_index(kind, int(index))
    if kind == "cuda" and not torch.compiler.is_compiling():
        _check_cuda(device)
        if torch.cuda.is_available():
            # Operators initialize CUDA without torch.cuda, whose memory statistics would then stay at zero.
            torch.cuda.init()
    return device


def _check_text(device: str) -> None:
    """Raises an error for a text from which PyTorch creates no device."""
    try:
        torch.device(device)
    except RuntimeError:
        raise _no_device(device) from None


def _no_device(device: str | int) -> ValueError:
    return ValueError(f'device {device!r} does not exist; give "cpu", "cuda", "cuda:1" or "meta"')


def _check_index(kind: str, index: int) -> None:
    """Raises an error for an index that PyTorch ignores, or that it turns into another one."""
    if kind == "cpu" and index != 0:
        raise ValueError(f'cpu:{index} is not available: all processors are the device "cpu"; load to "cpu"')
    if index < 0:
        raise _no_device(index)
    # PyTorch keeps 8 bits: "cuda:256" becomes cuda:0, and "cuda:999" cuda:-25.
    if index > _LARGEST_DEVICE_INDEX:
        raise ValueError(f"{kind}:{index} is not available: PyTorch counts devices from 0 to {_LARGEST_DEVICE_INDEX}")


def _check_cuda(device: torch.device | str) -> None:
    """Raises an error if PyTorch was not built for NVIDIA GPUs. With ROCm, "cuda" is an AMD GPU."""
    if torch.version.hip is not None:
        raise ValueError(
            f"{device}: this PyTorch was built for ROCm {torch.version.hip}, and fst loads to NVIDIA GPUs and the CPU; "
            'load to "cpu", and move the tensors with .to("cuda")'
        )
    if torch.version.cuda is None:
        raise ValueError(f"{device}: this PyTorch was built for the CPU only; install one that was built for CUDA")


def digests_of(digests: Digests, metadata: dict[str, str] | None) -> dict[str, str] | None:
    """Returns the metadata of a new file, which request digests."""
    if digests is None:
        return metadata
    if digests not in ("blake3", "sha256"):
        raise ValueError(f'digests must be "blake3", "sha256" or None, not {digests!r}')
    return {**(metadata or {}), DIGESTS_KEY: digests}


def dtype_of(dtype: Dtype) -> CastDtype:
    """Returns the dtype to cast to, or a mapping of patterns to dtypes, or None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        return one_dtype_of(dtype)
    if isinstance(dtype, Mapping):
        found: dict[str, torch.dtype | None] = {}
        for pattern, each in dtype.items():
            if not isinstance(pattern, str) or not isinstance(each, torch.dtype | str | None):
                raise TypeError(
                    f"dtype must map str to torch.dtype, str or None, not {pattern!r} to {each!r}{_dtype_hint(each)}"
                )
            found[_utf8(pattern)] = None if each is None else one_dtype_of(each)
        return found
    raise _not_a_dtype(dtype, "a torch.dtype, a str, a mapping of str to them, or None")


def one_dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a dtype, which a text may name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise _not_a_dtype(dtype, "a torch.dtype or a str")
    found = dtype_named(dtype)
    if found is None:
        raise ValueError(f'dtype {dtype!r} is not known; pass a torch.dtype, or a name such as "bfloat16" or "bf16"')
    return found


def _not_a_dtype(value: object, expected: str) -> TypeError:
    return TypeError(f"dtype must be {expected}, not {type(value).__name__}{_dtype_hint(value)}")


def _dtype_hint(value: object) -> str:
    """Returns the end of the error for a value that is not a dtype: NumPy's name of one."""
    named = dtype_named(getattr(value, "__name__", getattr(value, "name", "")))
    return "" if named is None else f"; pass {named}"


def dtype_arguments(dtype: CastDtype) -> dict[str, Any]:
    """Returns the result of `dtype_of` as the arguments that operators and classes take."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return {"dtype": dtype}
    for each in dtype.values():
        if each is not None and not (each.is_floating_point and each in SCALAR_TYPES):
            raise ValueError(f"dtype is {each}, but must be a floating-point dtype of 8 bits or more")
    numbers = [_STORED_DTYPE if each is None else SCALAR_TYPES[each] for each in dtype.values()]
    return {"dtype": None, "patterns": list(dtype), "dtypes": numbers}


def metadata_of(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Returns the metadata for a header, or None."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping of str to str, not {type(metadata).__name__}")
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(
                f"metadata must map str to str, not {key!r} to {text!r}; pass texts, such as json.dumps(value)"
            )
        _utf8(key + text)
    return dict(metadata)


def check_kind(name: str, tensor: Tensor) -> None:
    """Raises a ValueError if a tensor has no shape yet, is nested, or exists only within a transformation."""
    # Compilers cannot trace these questions. The operators refuse such tensors when they run.
    if torch.compiler.is_compiling():
        return
    if is_lazy(tensor):
        raise ValueError(f'tensor "{name}": it has no shape yet; call its lazy module once first')
    if tensor.is_nested:
        raise ValueError(
            f'tensor "{name}": a nested tensor is not supported; pass the tensors that its unbind() returns'
        )
    # PyTorch has no public function for either.
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f'tensor "{name}": it has no memory of its own within torch.func.vmap, grad or functionalize; pass the '
            "result of the transformation"
        )
