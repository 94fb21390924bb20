"""obstore: the crate object_store from Python. It has ranges but no tensors, which are views of one buffer here."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .base import Job, Loader, Tensors
from .views import tensor_views

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
            options = {"allow_http": True}
            tensors |= tensor_views(self._fetch(self._store.from_url(folder, client_options=options), name))
        return tensors

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
