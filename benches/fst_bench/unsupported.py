"""Error of what a library or a machine does not support."""


class UnsupportedError(Exception):
    """The library or the machine does not support the action. The message gives the reason, for the tables."""
