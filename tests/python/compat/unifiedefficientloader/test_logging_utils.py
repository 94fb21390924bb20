"""`logging_utils`: loggers, the formatter and the decorator."""

import logging

import pytest

from fst.compat import unifiedefficientloader as uel
from fst.compat.unifiedefficientloader import logging_utils


@pytest.fixture(autouse=True)
def _restore():
    """Removes the handlers and levels that a test sets."""
    logger = logging_utils.get_logger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_names_of_loggers():
    assert logging_utils.get_logger() is logging.getLogger("unifiedefficientloader")
    assert logging_utils.get_logger("part").name == "unifiedefficientloader.part"
    assert logging_utils.get_logger("unifiedefficientloader.part") is logging_utils.get_logger("part")


@logging_utils.log_debug
def add(left, right=0):
    """Adds."""
    return left + right


def test_calls_are_logged_at_debug_level_only(capsys):
    uel.setup_logging("VERBOSE")
    assert add(1, right=2) == 3
    assert capsys.readouterr().out == ""
    uel.setup_logging("DEBUG")
    assert add(1, right=2) == 3
    call, result = capsys.readouterr().out.splitlines()
    assert call.startswith("[DEBUG] unifiedefficientloader.test_logging_utils:")
    assert call.endswith(" - CALL add(1, right=2)")
    assert result.endswith(" - RET add -> <class 'int'>")
    assert (add.__name__, add.__doc__) == ("add", "Adds.")


def test_prefixes_of_levels(capsys):
    uel.setup_logging("DEBUG")
    uel.normal("normal %d", 1)
    uel.verbose("verbose")
    uel.warning("warning")
    uel.error("error")
    assert capsys.readouterr().out.splitlines() == [
        "normal 1",
        "[VERBOSE] verbose",
        "[WARNING] warning",
        "[ERROR] error",
    ]
