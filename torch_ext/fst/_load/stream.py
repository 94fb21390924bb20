"""Tensors one by one, while those behind them are still on their way."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from fst._core.arguments import Device, Paths, device_of, dtype_of, names_of, paths_of
from fst._core.classes import Loader

WINDOW_BYTES = 512 << 20


class Stream(Iterator[tuple[str, Tensor]]):
    """Names and tensors as they become ready: what `stream` returns. It can be used as a context manager."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __next__(self) -> tuple[str, Tensor]:
        item = self._loader.next()
        if item is None:
            raise StopIteration
        _, name, tensor = item
        return name, tensor

    def close(self) -> None:
        """Ends the load, frees what was not handed over, and ends the iteration. A second time it does nothing."""
        self._loader.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """What all tensors take together, in bytes, those that were handed over too."""
        return self._loader.total_bytes()


def stream(
    paths: Paths,
    device: Device = "cpu",
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    window_bytes: int = WINDOW_BYTES,
    order: Literal["file", "landed"] = "file",
) -> Stream:
    """Loads tensors in the background, and hands over each as soon as its bytes have landed.

    The load begins with the call. A tensor that was handed over is the caller's alone, and ready on the stream that is
    current then. Leaving the loop, an exception and Ctrl-C end the load and free what was not handed over. Threads may
    share a stream; each tensor goes to one of them. A forked child cannot use its parent's.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        device: As in `load_file`.
        names: The tensors to load; None loads all. The same name twice gives two separate tensors.
        dtype: As in `load_file`.
        window_bytes: How far the load may be ahead: tensors that take memory and were not handed over yet have at most
            this many bytes in all. A tensor that is larger than the window is loaded when nothing else is ahead.
        order: "file" hands over in the order of the files and of the bytes in each, whatever the order of `names`;
            "landed" does not wait for one tensor while the bytes of another are there.

    Returns:
        An iterator over pairs of a name and a tensor, with a method `close` and the number `total_bytes`. After an
        error it raises the same one again.

    Raises:
        KeyError: No file holds a name; the message tells the nearest names.
        ValueError: `window_bytes` is less than 1, or there is no such order.
        And the errors of `load_file`: those of paths, headers and arguments at once, those of reading and of the device
        with the tensor that they concern.

    Example:
        >>> with fst.stream("model.safetensors", window_bytes=1 << 20) as tensors:
        ...     for name, tensor in tensors:
        ...         print(name, list(tensor.shape))
        bias [4]
        weight [4, 3]
    """
    loader = Loader(
        paths_of(paths),
        device_of(device),
        None if names is None else names_of(names),
        dtype=dtype_of(dtype),
        window_bytes=window_bytes,
        order=order,
    )
    return Stream(loader)
