"""unifiedefficientloader: streams tensor by tensor with a thread pool, through pinned memory to a GPU."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .base import Loader, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

# The value that the library's load_all uses.
BATCH_TENSORS = 16


class Unified(Loader):
    def __init__(self) -> None:
        import unifiedefficientloader

        self._library = unifiedefficientloader

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with self._open(path) as file:
                tensors |= self._stream(file, file.keys(), device)
        return tensors

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> "dict[str, Tensor]":
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with self._open(path) as file:
                held = [name for name in names if name in file._header]
                tensors |= self._stream(file, held, device)
        return tensors

    def reader(self, paths: Sequence[str], device: str) -> str:
        return "its threads"

    def _open(self, path: str) -> Any:
        return self._library.UnifiedSafetensorsLoader(path, low_memory=True)

    def _stream(self, file: Any, names: Sequence[str], device: str) -> "Iterator[tuple[str, Tensor]]":
        on_cuda = device != "cpu"
        for batch in file.async_stream(names, batch_size=BATCH_TENSORS, pin_memory=on_cuda):
            for name, tensor in batch:
                yield name, tensor.to(device, non_blocking=True) if on_cuda else tensor


class UnifiedDirect(Unified):
    """Pipeline of pinned buffers and slabs on the GPU. Slabs are reused unless a tensor is copied."""

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        self._refuse_cpu(device)
        return super().load(paths, device)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> "dict[str, Tensor]":
        self._refuse_cpu(device)
        return super().select(paths, names, device)

    def _refuse_cpu(self, device: str) -> None:
        if device == "cpu":
            raise UnsupportedError("direct_gpu loads to CUDA devices only")

    def _open(self, path: str) -> Any:
        return self._library.UnifiedSafetensorsLoader(path, low_memory=True, direct_gpu=True)

    def _stream(self, file: Any, names: Sequence[str], device: str) -> "Iterator[tuple[str, Tensor]]":
        for batch in file.async_stream(names, batch_size=BATCH_TENSORS):
            for name, tensor in batch:
                if tensor.device.type == "cpu":
                    raise RuntimeError(f"direct_gpu fell back to the CPU at {name}")
                yield name, tensor.clone()
                file.mark_processed(name)
