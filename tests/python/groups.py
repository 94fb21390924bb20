"""Process groups that need no other processes."""


class FakeGroup:
    """Minimal process group of a given size, in which this process is rank 0."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0
