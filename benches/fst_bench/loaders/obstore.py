"""obstore: the crate object_store from Python. It has ranges but no tensors, which are views of one buffer here."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .base import Job, Loader, Tensors
from .views import tensor_views, typed

THREADS = 16
RANGE_BYTES = 8 << 20


class Obstore(Loader):
    method = f"get_range, {THREADS} threads"

    def __init__(self) -> None:
        import obstore
        from obstore import store

        self._obstore = obstore
        self._store = store

    def load(self, job: Job) -> Tensors:
        tensors: Tensors = {}
        for path in job.paths:
            folder, _, name = path.rpartition("/")
            tensors |= self._load(self._store.from_url(folder, client_options={"allow_http": True}), name)
        return tensors

    def _load(self, store: Any, name: str) -> Tensors:
        return tensor_views(self._fetch(store, name))

    def _fetch(self, store: Any, name: str) -> bytearray:
        """Fetches an object by ranges of equal size, each by one of several threads."""
        size_bytes = self._obstore.head(store, name)["size"]
        data = bytearray(size_bytes)
        view = memoryview(data)

        def fetch(begin: int) -> None:
            end = min(begin + RANGE_BYTES, size_bytes)
            view[begin:end] = memoryview(self._obstore.get_range(store, name, start=begin, end=end))

        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(fetch, begin) for begin in range(0, size_bytes, RANGE_BYTES)]:
                done.result()
        return data


class ObstoreRanges(Obstore):
    """All tensors of an object by one call, which joins ranges without gaps. Each tensor is a view of its range."""

    method = "get_ranges, one call"

    def _load(self, store: Any, name: str) -> Tensors:
        length = int.from_bytes(memoryview(self._obstore.get_range(store, name, start=0, end=8)), "little")
        header = json.loads(bytes(memoryview(self._obstore.get_range(store, name, start=8, end=8 + length))))
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        starts, ends = ([8 + length + entry["data_offsets"][bound] for entry in entries.values()] for bound in range(2))
        ranges = self._obstore.get_ranges(store, name, starts=starts, ends=ends)
        views = (torch.frombuffer(memoryview(data), dtype=torch.uint8) for data in ranges)
        return {key: typed(view, entry) for (key, entry), view in zip(entries.items(), views, strict=True)}
