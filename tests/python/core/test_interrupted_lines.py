"""Interrupts between any two lines of functions that take locks, count or replace something."""

import math
import signal
import sys
import types
from concurrent import futures

import pytest
import torch

import fst
from fst._core.interrupts import defer_interrupts
from fst._save import background, save
from fst.compat.tensorizer import torch_compat
from fst.plugins._replaced import replaced


def save_in_background(path):
    fst.save_file_async({"a": torch.ones(3)}, path / "m.safetensors").result(60)


def save_after_failure(path):
    failed = fst.save_file_async({"a": torch.ones(3)}, path / "absent" / "m.safetensors")
    futures.wait([failed])
    with pytest.raises(FileNotFoundError):
        save_in_background(path)


def wait_for_saves(path):
    save.background.wait()
    save.background.raise_pending()


def end_block():
    # Only further interrupts could stop the lines after the block, which restore what it has changed.
    sys.settrace(None)
    raise InterruptedError


def deferred(path):
    with defer_interrupts():
        end_block()


def in_block(path):
    with torch_compat.tensorizer_saving():
        end_block()


def in_replaced(path):
    with replaced(math, cos=math.sin):
        end_block()


# A call, and the functions in which it is interrupted, in the calling thread.
CASES = {
    save_in_background: (background.BackgroundSaves.start, background.SaveFuture.result, fst.save_file_async),
    save_after_failure: (background.BackgroundSaves.raise_pending,),
    wait_for_saves: (background.BackgroundSaves.wait,),
    deferred: (defer_interrupts.__wrapped__,),
    in_block: (torch_compat._block.__wrapped__,),
    in_replaced: (replaced.__wrapped__,),
}


def nested(code):
    """Yields a code object and the code objects of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def interrupt_at(line, codes, call):
    """Calls a function, and raises `KeyboardInterrupt` before a line, counted over `codes`. Returns whether it came."""
    left = line
    seen = set()

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code not in codes:
            return None
        if event == "line" and (frame, frame.f_lineno) not in seen:
            # Python shows the line of a `with` again at its end, where it handles no signals.
            seen.add((frame, frame.f_lineno))
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, InterruptedError):
        pass
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_interrupts_between_lines_leave_nothing_locked(tmp_path, call):
    codes = {code for function in CASES[call] for code in nested(function.__code__)}
    handler, functions = signal.getsignal(signal.SIGINT), (torch.save, torch.load, math.cos)
    line = 1
    while interrupt_at(line, codes, lambda: call(tmp_path)) and line < 100:
        save.background.warn_pending()
        save_in_background(tmp_path)
        assert (signal.getsignal(signal.SIGINT), (torch.save, torch.load, math.cos)) == (handler, functions), line
        line += 1
    assert 3 < line < 100
