"""The first bytes of a file on an HTTP server, which are received when they are needed."""

import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import fst
from fst_bench.http_server import Fault, Server
from objects import HEADER, assert_equal, tensors
from processes import run_in_fork
from rawfile import assert_same

TENSORS = tensors()
DATA = save(TENSORS)
PATH = "m.safetensors"
# After the header of the file, and before the end of the first answer.
INSIDE = HEADER // 2
RATE = 4e6  # bytes a second, with which the first answer takes a quarter of a second

pytestmark = pytest.mark.usefixtures("small_requests")


@pytest.fixture
def server(http_server):
    http_server.put(PATH, DATA)
    return http_server


def test_header_needs_no_byte_after_it(server):
    server.fault(PATH, Fault("stall", at=INSIDE, times=None))
    with fst.profile() as profile:
        assert set(fst.tensor_names(server.url(PATH))) == set(TENSORS)
    assert profile.summary().retries == 0


@pytest.mark.parametrize(
    ("at", "kind"), [(3, "stall"), (3, "reset"), (500, "truncate"), (INSIDE, "stall"), (HEADER - 1, "reset")]
)
def test_rest_of_a_failed_answer_is_requested(server, at, kind):
    server.fault(PATH, Fault(kind, at=at))
    with fst.profile() as profile:
        assert_equal(fst.load_file(server.url(PATH)), TENSORS)
    assert profile.summary().retries == 1
    assert profile.summary().repeated_bytes <= HEADER - at
    assert at in {request.range[0] for request in server.requests(PATH)}


def test_first_answer_with_too_many_bytes_is_an_error(server):
    server.fault(PATH, Fault("long-body", at=0, times=None))
    with pytest.raises(OSError, match=re.escape(server.url(PATH))):
        fst.load_file(server.url(PATH))


def test_byte_after_the_first_answer_is_not_used(server):
    server.fault(PATH, Fault("overrun", at=0))
    assert_equal(fst.load_file(server.url(PATH)), TENSORS)


@settings(max_examples=15)
@given(at=st.lists(st.integers(0, HEADER - 1), min_size=1, max_size=2), kind=st.sampled_from(["reset", "truncate"]))
def test_any_failures_of_the_first_answer(at, kind):
    with Server({PATH: DATA}) as server:
        server.fault(PATH, *(Fault(kind, at=byte) for byte in at))
        with fst.safe_open(server.url(PATH)) as file:
            assert_equal({name: file.get_tensor(name) for name in file.keys()}, TENSORS)  # noqa: SIM118


def test_threads_share_the_first_answer(http_server, run_threads):
    many = {f"{number:02}": torch.full((1 << 14,), number) for number in range(12)}
    data = save(many)
    http_server.put(PATH, data)
    http_server.rate = RATE
    names, loaded = list(many), {}
    with fst.safe_open(http_server.url(PATH)) as file:

        def load():
            for _ in range(3):
                name = names.pop()
                loaded[name] = file.get_tensor(name)

        run_threads(load, 4)
    assert_equal(loaded, many)
    assert http_server.counts().sent_bytes == len(data)


def test_rest_of_an_answer_that_waited_too_long_is_requested(server):
    server.rate = RATE
    with fst.profile() as profile, fst.safe_open(server.url(PATH)) as file:
        time.sleep(1.1)
        assert_equal({name: file.get_tensor(name) for name in TENSORS}, TENSORS)
    assert profile.summary().repeated_bytes < HEADER


def test_forked_child_requests_the_first_bytes_itself(server):
    server.rate = RATE
    name = next(name for name in TENSORS if name.startswith("small"))
    with fst.safe_open(server.url(PATH)) as file:
        run_in_fork(lambda: assert_same(file.get_tensor(name), TENSORS[name]))
        assert_equal({name: file.get_tensor(name) for name in TENSORS}, TENSORS)
    assert [request.range[0] for request in server.requests(PATH)].count(0) == 1
