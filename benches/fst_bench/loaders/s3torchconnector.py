"""s3torchconnector: a file object for S3, whose client fetches ranges. Tensors are views of the bytes it fills in."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Loader
from .views import tensor_views

if TYPE_CHECKING:
    from torch import Tensor


class S3TorchConnector(Loader):
    def __init__(self) -> None:
        import s3torchconnector

        self._connector = s3torchconnector

    def load(self, paths: Sequence[str], device: str) -> "dict[str, Tensor]":
        checkpoint = self._connector.S3Checkpoint(
            os.environ["AWS_REGION"],
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=self._connector.S3ClientConfig(force_path_style=True),
        )
        tensors: dict[str, Tensor] = {}
        for path in paths:
            with checkpoint.reader(path) as file:
                size_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                data = bytearray(size_bytes)
                view, done = memoryview(data), 0
                while done < size_bytes:
                    done += file.readinto(view[done:])
            tensors |= tensor_views(data)
        return tensors

    def reader(self, paths: Sequence[str], device: str) -> str:
        return "S3Checkpoint.reader"
