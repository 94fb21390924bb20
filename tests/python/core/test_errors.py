"""Exceptions that the bindings of operators and classes raise."""

import inspect
import re

import pytest

from fst._core import classes, loads, ops
from fst._core.errors import EXCEPTIONS, OS_EXCEPTIONS
from suite import CHECKOUT

FUNCTIONS = [
    function for _, function in inspect.getmembers(ops, inspect.isfunction) if function.__module__ == ops.__name__
]
WRAPPERS = [
    wrapper
    for _, wrapper in inspect.getmembers(classes, inspect.isclass)
    if wrapper.__module__ == classes.__name__ and wrapper is not classes.TensorInfo
]


def test_all_bindings_translate_errors():
    # All methods of `Loads` call `_run`.
    methods = [loads.OperatorLoads._run] + [
        method
        for wrapper in WRAPPERS
        for name, method in inspect.getmembers(wrapper, inspect.isfunction)
        if name == "_run" or method is not getattr(loads.Loads, name, None)
    ]
    assert FUNCTIONS
    assert methods
    assert [function.__qualname__ for function in [*FUNCTIONS, *methods] if not hasattr(function, "__wrapped__")] == []


def codes_of_core():
    codes = re.findall(r'^    \w+ = "([a-z-]+)",$', (CHECKOUT / "rust" / "error.rs").read_text(), re.MULTILINE)
    assert codes
    return codes


def test_every_code_has_its_exception():
    assert sorted(codes_of_core()) == sorted([*EXCEPTIONS, *OS_EXCEPTIONS])


@pytest.mark.parametrize("path", ["torch_ext/fst/include/fst/fst.h", "docs/cpp.md"])
def test_cpp_documents_every_code_once(path):
    listed = re.findall(r"^(?://|\|) .*\bc10::.*\[.*|^// {20,}\[.*", (CHECKOUT / path).read_text(), re.MULTILINE)
    assert sorted(re.findall(r"\[([a-z-]+)\]", "\n".join(listed))) == sorted(codes_of_core())
