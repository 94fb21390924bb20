"""A tensor of an open checkpoint, of which parts are read by indexing."""

from typing import Any

from fst._checkpoint.handle import Handle


class Slice:
    """What `safe_open.get_slice` returns. Indexing it reads what the result needs, and no more."""

    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name
        self._entry = handle.checkpoint.tensor_info(name)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor, as the file has it."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype as the file has it: "F32", "BF16", ..."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._handle.load_part(self._name, self._entry, index)
