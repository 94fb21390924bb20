"""`fst.patch` and KeyboardInterrupt: `unpatch` restores everything, wherever the interrupt comes."""

import sys
import types
from pathlib import Path

import pytest
import safetensors
import safetensors.torch

import fst
import fst._patch
import fst.torch

ROOM = str(Path(fst._patch.__file__).parent)
SAFE_OPEN, LOAD_FILE = safetensors.safe_open, safetensors.torch.load_file


class InterruptedLine:
    """Raises KeyboardInterrupt when the line with the number `line` of all traced lines of `fst._patch` begins."""

    def __init__(self, line):
        self.line = line
        self.count = 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        # Functions are interrupted before their first line, too.
        if event in ("call", "line"):
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self

    def run(self, function):
        """Runs a function. Returns whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def one_block():
    with fst.patch():
        pass


def calls():
    fst.patch()
    fst.patch()
    fst.unpatch()


def block_in_a_call():
    fst.patch()
    with fst.patch():
        pass
    fst.unpatch()


def new_module():
    """A module is imported in the block, so that the end of the block finds a reference to restore."""
    with fst.patch():
        module = types.ModuleType("imported_in_block")
        module.load = safetensors.torch.load_file
        fst._patch.bindings.sys.modules["imported_in_block"] = module


@pytest.fixture
def modules(monkeypatch):
    """Few modules, two of which refer to functions of safetensors, so that a scan has few lines."""
    kept = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] == "safetensors"}
    other = types.ModuleType("other")
    other.opener, other.load = SAFE_OPEN, LOAD_FILE
    few = kept | {name: sys.modules[name] for name in ("sys", "torch", "fst", "fst.torch")} | {"other": other}
    monkeypatch.setattr(
        fst._patch.bindings, "sys", types.SimpleNamespace(modules=few, stdlib_module_names=sys.stdlib_module_names)
    )
    # The first block looks at every name.
    one_block()
    return few


def is_restored(modules):
    references = [safetensors.safe_open, safetensors.torch.safe_open, modules["other"].opener]
    functions = [safetensors.torch.load_file, modules["other"].load]
    if "imported_in_block" in modules:
        functions.append(modules["imported_in_block"].load)
    return all(item is SAFE_OPEN for item in references) and all(item is LOAD_FILE for item in functions)


@pytest.mark.parametrize("change", [one_block, calls, block_in_a_call, new_module])
def test_unpatch_restores_after_an_interrupt_at_any_line(modules, change):
    line, wrong = 1, []
    while InterruptedLine(line).run(change):
        fst.unpatch()
        if not is_restored(modules):
            wrong.append(line)
        modules.pop("imported_in_block", None)
        # The next block works, and ends.
        with fst.patch():
            assert safetensors.safe_open is not SAFE_OPEN is not modules["other"].opener
        assert is_restored(modules)
        line += 1
    fst.unpatch()
    assert line > 50, "too few lines were traced"
    assert wrong == []
