"""Logger "unifiedefficientloader", with the additional level VERBOSE."""

import logging
import sys
from functools import partial

DEBUG_LEVEL = logging.DEBUG
VERBOSE_LEVEL = 15
NORMAL_LEVEL = logging.INFO
MINIMAL_LEVEL = logging.WARNING

# WARNING keeps its name: level names are global to the process.
logging.addLevelName(VERBOSE_LEVEL, "VERBOSE")

_LOGGER = logging.getLogger("unifiedefficientloader")
_LEVELS = {"DEBUG": DEBUG_LEVEL, "VERBOSE": VERBOSE_LEVEL, "NORMAL": NORMAL_LEVEL, "MINIMAL": MINIMAL_LEVEL}


class _Handler(logging.StreamHandler):  # pyrefly: ignore[implicit-any-type-argument]
    """Handler of `setup_logging`, which the next call replaces. Handlers of the program are kept.

    Prefixes messages with their level, except those at `NORMAL_LEVEL`.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == NORMAL_LEVEL else f"[{record.levelname}] {text}"


def setup_logging(verbose_arg: str = "NORMAL") -> logging.Logger:
    """Prints log messages to the standard output.

    Args:
        verbose_arg: Lowest level to print: "DEBUG", "VERBOSE", "NORMAL" or "MINIMAL". Any other value means "NORMAL".
    """
    _LOGGER.setLevel(_LEVELS.get(verbose_arg.upper(), NORMAL_LEVEL))
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, _Handler):
            _LOGGER.removeHandler(handler)
    _LOGGER.addHandler(_Handler(sys.stdout))
    return _LOGGER


# Logs at `DEBUG_LEVEL`.
debug = _LOGGER.debug
# Logs at `VERBOSE_LEVEL`.
verbose = partial(_LOGGER.log, VERBOSE_LEVEL)
# Logs at `NORMAL_LEVEL`.
normal = info = _LOGGER.info
# Logs at `MINIMAL_LEVEL`.
minimal = warning = _LOGGER.warning
# Logs at `logging.ERROR`.
error = _LOGGER.error
