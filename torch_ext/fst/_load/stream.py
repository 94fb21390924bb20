"""Streams of tensors: each is returned while later tensors are still loading."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._core.arguments import DEFAULT_WINDOW_BYTES, Device, Dtype, Paths, Size, device_of, dtype_of, names_of, size_of
from fst._load.progress import LoaderWithBar, TensorLoader

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Stream(Iterator[tuple[str, Tensor]]):
    """Iterator over names and tensors of a load in progress, and a context manager that ends the load. See `stream`."""

    def __init__(self, loader: TensorLoader) -> None:
        self._loader = loader

    def __next__(self) -> tuple[str, Tensor]:
        item = self._loader.next()
        if item is None:
            raise StopIteration
        _, name, tensor = item
        return name, tensor

    def close(self) -> None:
        """Ends the load and the iteration, and frees the tensors that were not returned. Later calls do nothing."""
        self._loader.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """Size in bytes of all tensors of the stream, including those already returned."""
        return self._loader.total_bytes()


@with_options(ReadOptions)
def stream(
    paths: Paths,
    device: Device = "cpu",
    names: Sequence[str] | None = None,
    dtype: Dtype = None,
    *,
    window_bytes: Size = DEFAULT_WINDOW_BYTES,
    order: Literal["file", "ready"] = "file",
    progress: bool = False,
    **options: "Unpack[ReadOptions]",
) -> Stream:
    """Loads tensors in the background and returns each as soon as it is ready.

    The load begins with the call. Each tensor owns its storage and is ready on the CUDA stream that is current when it
    is returned. Leaving the loop, an exception and Ctrl-C end the load and free the tensors that were not returned.
    Threads may share a stream; each tensor goes to one thread. A forked child process cannot use a stream of its
    parent.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        device: As in `load_file`.
        names: The tensors to load. `None` loads all. A name that occurs twice gives two separate tensors.
        dtype: As in `load_file`.
        window_bytes: Upper bound for the memory of tensors that are loaded or loading and not yet returned, in bytes,
            or as a text such as "64MB".
            A tensor larger than the window is loaded when no other tensor is waiting.
        order: `"file"` returns tensors in the order of the files and of the bytes in each, independent of the order of
            `names`. `"ready"` returns each tensor once it is ready, and does not wait for an earlier one.
        progress: Shows a progress bar of the bytes that were returned, which requires tqdm.
        verify: Whether each tensor is verified with the digests in its file before it is returned. A manifest, as for
            `load_file`, is a ValueError, since it has the digests of whole files, except for `.tensors` files and
            encrypted ones, which are read and verified when they are opened.
        encryption_key: As in `load_file`.
        recipe, dequantize: As in `load_file`. Outputs come in the order of the rules, in batches of half a window.

    Returns:
        An iterator over pairs of a name and a tensor, with a method `close` and an attribute `total_bytes`. After an
        error, the iterator raises the same error again.

    Raises:
        KeyError: No file holds a name. The message lists the nearest names.
        ImportError: `progress` is True and tqdm is not installed.
        ValueError: `window_bytes` is less than 1, or `order` is unknown.
        And the errors of `load_file`. Errors in paths, headers and arguments are raised by this call. Errors in reading
        and on the device are raised instead of the tensor that they concern.

    Example:
        >>> with fst.stream("model.safetensors", window_bytes=1 << 20) as tensors:
        ...     for name, tensor in tensors:
        ...         print(name, list(tensor.shape))
        bias [4]
        weight [4, 3]
    """
    device, dtype = device_of(device), dtype_of(dtype)
    selected = None if names is None else names_of(names)
    checkpoint = OpenCheckpoint(paths, None, *reading_of(**options))
    loader = checkpoint.stream(selected, None, device, dtype, size_of(window_bytes, "window_bytes"), order)
    return Stream(LoaderWithBar(loader) if progress else loader)
