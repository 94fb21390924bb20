"""Process group of a single process."""


class SingleGroup:
    """Process group of a single process."""

    def size(self) -> int:
        """Returns the number of ranks."""
        return 1

    def rank(self) -> int:
        """Returns the rank of this process."""
        return 0
