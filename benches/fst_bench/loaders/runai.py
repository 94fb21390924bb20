"""Run:ai Model Streamer: streams with a thread pool into buffers that the tensors share."""

from collections.abc import Sequence

from torch import Tensor

from .base import Loader


class RunaiStreamer(Loader):
    method = "its streamer"

    def __init__(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def load(self, paths: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._stream(paths, None, device)

    def select(self, paths: Sequence[str], names: Sequence[str], device: str) -> dict[str, Tensor]:
        return self._stream(paths, names, device)

    def _stream(self, paths: Sequence[str], names: Sequence[str] | None, device: str) -> dict[str, Tensor]:
        with self._streamer() as streamer:
            streamer.stream_files(list(paths), device=device, tensor_names=names)
            return dict(streamer.get_tensors())
