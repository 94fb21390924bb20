"""Texts of errors for people."""


def message_of(error: Exception) -> str:
    """Returns the text of an exception without what Python adds: the quotes of a KeyError, the number of an OSError.

    The path of an OSError comes first, as in errors of the core.
    """
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
