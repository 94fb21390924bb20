"""Libraries that stream files: InstantTensor, and Run:ai Model Streamer."""

from typing import Any

from ..unsupported import UnsupportedError
from .base import Job, Loader, Tensors


class InstantTensor(Loader):
    """Streams through a ring buffer on the GPU. Each tensor is copied out of the ring."""

    method = "the backend it chooses"

    def __init__(self) -> None:
        import instanttensor

        self._instanttensor = instanttensor

    def load(self, job: Job) -> Tensors:
        return self._read(job)

    def select(self, job: Job) -> Tensors:
        return self._read(job, tensor_filter=job.names, tensor_name_match_mode="exact")

    def _read(self, job: Job, **options: Any) -> Tensors:
        if job.device == "cpu":
            # The library's own message, raised before any other check.
            try:
                self._instanttensor.safe_open(job.paths, framework="pt", device=job.device)
            except ValueError as error:
                raise UnsupportedError(str(error)) from error
        with self._instanttensor.safe_open(job.paths, framework="pt", device=job.device, **options) as file:
            return dict(file.tensors())


class RunaiStreamer(Loader):
    """Streams with a thread pool into buffers that the tensors share."""

    method = "its streamer"

    def __init__(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def load(self, job: Job) -> Tensors:
        with self._streamer() as streamer:
            streamer.stream_files(job.paths, device=job.device, tensor_names=job.names or None)
            return dict(streamer.get_tensors())

    select = load
