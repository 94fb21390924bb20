"""Fixtures for all tests.

The tests import the `fst` that Python finds: this checkout's with PYTHONPATH=torch_ext, or else an installed one.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import fst
from budget import Budget
from forked import ForkedProgram
from fst import cli
from rank_processes import Ranks
from suite import CHUNKS, READER_AND_CHUNKS, READERS, require_ci, require_gpu

# Libraries read these variables when they are imported. Models come from folders and packages. Compiled programs need
# not be fast, so PyTorch does not probe for vector instructions, which imports it in a process per kind, nor optimizes.
os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0"}

# A shell starts commands in the background with SIGINT ignored, which Python and its child processes keep.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A rented machine may lack it, and then runs the tests that need none.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "fst", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    settings.load_profile("fst")


# Machines with a GPU, and the emulator of a processor, may have no pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of processes: half of the time of tests, they wait for servers, children and timers."""
    return len(os.sched_getaffinity(0)) * 2


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())


def pytest_runtest_setup(item: pytest.Item) -> None:
    require_gpu(item)
    require_ci(item)


def pytest_collection_finish() -> None:
    """Exempts imported modules from garbage collection, which some tests and libraries trigger often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes options of fst from the environment."""
    for name in (
        "FST_READER",
        "FST_THREADS",
        "FST_QUEUE_DEPTH",
        "FST_CHUNK_BYTES",
        "FST_STAGING_BYTES",
        "FST_DROP_CACHE",
        "FST_LOG",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with each reader in turn. Tests without this fixture use `auto`."""
    monkeypatch.setenv("FST_READER", request.param)
    return request.param


@pytest.fixture(params=CHUNKS)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the default chunk size, then with the smallest chunks and two staging slots."""
    _set_chunks(request.param, monkeypatch)


@pytest.fixture(params=READER_AND_CHUNKS, ids=" ".join)
def reader_and_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with each reader and each chunk size, but not with their product, which the plain loads take."""
    reader, chunks = request.param
    monkeypatch.setenv("FST_READER", reader)
    _set_chunks(chunks, monkeypatch)


def _set_chunks(chunks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunks == "small chunks":
        monkeypatch.setenv("FST_CHUNK_BYTES", "4096")
        monkeypatch.setenv("FST_STAGING_BYTES", "8192")


@dataclass(frozen=True)
class Result:
    """Result of the command `fst`."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Result]:
    """Runs `fst` in this process, which has imported PyTorch, in the directory of the test."""
    # Processes of pytest-xdist have the width of the terminal.
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object) -> Result:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return Result(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def run_threads() -> Callable[..., None]:
    """Runs a function in several threads at once and raises the first exception."""

    def run(function: Callable[[], None], count: int) -> None:
        with ThreadPoolExecutor(count) as threads:
            for future in [threads.submit(function) for _ in range(count)]:
                future.result()

    return run


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Returns the group of ranks of a given size. A group is started when a test first uses it."""
    groups: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in groups:
            groups[size] = Ranks(size)
        return groups[size]

    yield of
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def python_environ() -> dict[str, str]:
    """Environment variables with which another Python imports the same fst, and the helpers of the tests."""
    path = [str(Path(fst.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.fixture
def run_python(python_environ: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Runs a program in a new Python, which must succeed, and returns its output."""

    def run(program: str, *arguments: str, **environ: str) -> str:
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(
            command, env=python_environ | environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def start_python(python_environ: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., ForkedProgram]]:
    """Starts a program in a process that has imported PyTorch and fst already, and kills it after the test."""
    started: list[ForkedProgram] = []

    def start(program: str, *arguments: str, **environ: str) -> ForkedProgram:
        started.append(ForkedProgram(program, *arguments, environ=python_environ | environ, directory=tmp_path))
        return started[-1]

    yield start
    for forked in started:
        forked.close()


@pytest.fixture
def fork_python(start_python: Callable[..., ForkedProgram]) -> Callable[..., str]:
    """Runs a program as `run_python` does, but in a process that has imported PyTorch and fst already."""
    return lambda program, *arguments, **environ: start_python(program, *arguments, **environ).succeed()
