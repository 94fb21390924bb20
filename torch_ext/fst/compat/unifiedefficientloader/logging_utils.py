"""Logger "unifiedefficientloader", with the additional level VERBOSE."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

DEBUG_LEVEL = logging.DEBUG
VERBOSE_LEVEL = 15
NORMAL_LEVEL = logging.INFO
MINIMAL_LEVEL = logging.WARNING

# WARNING keeps its name: level names are global to the process.
logging.addLevelName(VERBOSE_LEVEL, "VERBOSE")

_NAME = "unifiedefficientloader"
_LOGGER = logging.getLogger(_NAME)
_LEVELS = {"DEBUG": DEBUG_LEVEL, "VERBOSE": VERBOSE_LEVEL, "NORMAL": NORMAL_LEVEL, "MINIMAL": MINIMAL_LEVEL}


_Function = TypeVar("_Function", bound=Callable[..., Any])


class CustomFormatter(logging.Formatter):
    """Prefixes messages with their level, except those at NORMAL_LEVEL. DEBUG_LEVEL adds the logger and the line."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno <= DEBUG_LEVEL:
            return f"[{record.levelname}] {record.name}:{record.lineno} - {text}"
        return text if VERBOSE_LEVEL < record.levelno <= NORMAL_LEVEL else f"[{record.levelname}] {text}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler of `setup_logging`, which the next call replaces. Handlers of the program are kept."""


def setup_logging(verbose_arg: str = "NORMAL") -> logging.Logger:
    """Prints log messages to the standard output.

    Args:
        verbose_arg: Lowest level to print: "DEBUG", "VERBOSE", "NORMAL" or "MINIMAL". Any other value means "NORMAL".
    """
    _LOGGER.setLevel(_LEVELS.get(verbose_arg.upper(), NORMAL_LEVEL))
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, _Handler):
            _LOGGER.removeHandler(handler)
    handler = _Handler(sys.stdout)
    handler.setFormatter(CustomFormatter())
    _LOGGER.addHandler(handler)
    return _LOGGER


def get_logger(name: str | None = None) -> logging.Logger:
    """Returns the logger "unifiedefficientloader", or the logger of this name below it."""
    if not name:
        return _LOGGER
    return logging.getLogger(name if name.startswith(_NAME) else f"{_NAME}.{name}")


def log_debug(func: _Function) -> _Function:
    """Decorator that logs calls with their arguments, and the types of their results, at `DEBUG_LEVEL`."""
    logger = get_logger(func.__module__.rpartition(".")[2])

    @functools.wraps(func)
    def logged(*args: Any, **kwargs: Any) -> Any:
        if not logger.isEnabledFor(DEBUG_LEVEL):
            return func(*args, **kwargs)
        arguments = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
        logger.log(DEBUG_LEVEL, "CALL %s(%s)", func.__name__, ", ".join(arguments))
        result = func(*args, **kwargs)
        logger.log(DEBUG_LEVEL, "RET %s -> %s", func.__name__, type(result))
        return result

    return logged  # type: ignore[return-value]


def debug(msg: object, *args: object, **kwargs: Any) -> None:
    """Logs at `DEBUG_LEVEL`."""
    _LOGGER.log(DEBUG_LEVEL, msg, *args, **kwargs)


def verbose(msg: object, *args: object, **kwargs: Any) -> None:
    """Logs at `VERBOSE_LEVEL`."""
    _LOGGER.log(VERBOSE_LEVEL, msg, *args, **kwargs)


def normal(msg: object, *args: object, **kwargs: Any) -> None:
    """Logs at `NORMAL_LEVEL`."""
    _LOGGER.log(NORMAL_LEVEL, msg, *args, **kwargs)


info = normal


def minimal(msg: object, *args: object, **kwargs: Any) -> None:
    """Logs at `MINIMAL_LEVEL`."""
    _LOGGER.log(MINIMAL_LEVEL, msg, *args, **kwargs)


warning = minimal


def error(msg: object, *args: object, **kwargs: Any) -> None:
    """Logs at `logging.ERROR`."""
    _LOGGER.error(msg, *args, **kwargs)
