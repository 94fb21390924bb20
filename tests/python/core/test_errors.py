"""Exceptions that the bindings of operators and classes raise."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import fst
from fst._core import checkpoint, classes, loads, memory, ops, secret_key
from fst._core.errors import EXCEPTIONS, OS_EXCEPTIONS
from suite import CHECKOUT

FUNCTIONS = [
    function for _, function in inspect.getmembers(ops, inspect.isfunction) if function.__module__ == ops.__name__
]
WRAPPERS = [
    wrapper
    for module in (checkpoint, classes, memory, secret_key)
    for _, wrapper in inspect.getmembers(module, inspect.isclass)
    if wrapper.__module__ == module.__name__ and wrapper is not checkpoint.TensorInfo
]


def test_all_bindings_translate_errors():
    # All methods of `Loads` call `_run`, and methods of `CoreObject` translate what they call.
    methods = [loads.OperatorLoads._run] + [
        method
        for wrapper in WRAPPERS
        for _, method in inspect.getmembers(wrapper, inspect.isfunction)
        if method.__module__ == wrapper.__module__ and "_object" in inspect.unwrap(method).__code__.co_names
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


def exceptions_of_package():
    """Returns all exceptions and warnings of the package, with modules that need other packages where these exist."""
    for module in pkgutil.walk_packages(fst.__path__, "fst.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue
    found, classes = set(), [BaseException]
    while classes:
        subclasses = classes.pop().__subclasses__()
        classes += subclasses
        found.update(each for each in subclasses if each.__module__.partition(".")[0] == "fst")
    return sorted(found, key=lambda each: each.__qualname__)


def sample(kind):
    """Returns an exception whose attributes all have values."""
    error = kind(116, "a message") if issubclass(kind, OSError) else kind("a message")
    for number, attribute in enumerate(vars(error)):
        setattr(error, attribute, [number])
    return error


def test_exceptions_survive_copies_and_processes():
    samples = [sample(kind) for kind in exceptions_of_package()]
    assert {fst.ModuleMismatchError, fst.RankError, fst.IntegrityError} <= {type(error) for error in samples}
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        returned = pool.submit(copy.copy, samples).result(60)
        for error, other in zip(samples, returned, strict=True):
            for copied in (other, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
                assert type(copied) is type(error)
                assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
