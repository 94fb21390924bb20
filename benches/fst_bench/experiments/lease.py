"""Two commands that use a GPU for minutes: each step has its own process and time limit, and keeps its results at once.

A step that fails or hangs costs only itself. The most valuable steps come first, because a machine may be lost at any
time. Nothing is written outside of the output folder; what the steps need but nobody keeps is removed at the end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..child import NO_BYTECODE, plain_environment
from ..machine import commit
from .context import Context, Rows
from .copies import copies
from .driver import DriverError
from .events import waits
from .loads import designs, files, launches, loads, models
from .memory import allocation, objects, registration
from .probe import probe
from .reads import reads, starts

CHECKOUT = Path(__file__).resolve().parents[3]
# Seconds of each command.
BUDGETS = {"1": 420, "2": 300}
# Each experiment with its time limit in seconds, and the decision that its rows drive.
EXPERIMENTS: dict[str, tuple[Callable[[Context], Rows], int, str]] = {
    "probe": (probe, 10, "whether slots get huge pages, and how many threads feed a GPU"),
    "reads": (reads, 30, "whether reads or the link bound a second load, and slots that stay in L3"),
    "files": (files, 30, "nothing: it writes the files of the next experiments"),
    "loads": (loads, 60, "what all others are compared with"),
    "allocation": (allocation, 25, "windows, beside which tensors are allocated"),
    "launches": (launches, 40, "whether fst.warm_up loads what the first kernel needs"),
    "starts": (starts, 5, "whether a load may start its threads more than once"),
    "copies": (copies, 45, "one stream or two, an event after each copy, and the size of chunks"),
    "registration": (registration, 45, "huge pages for slots, one registration at a time, fst.warm_up"),
    "waits": (waits, 15, "how workers wait for a slot"),
    "objects": (objects, 10, "the module only for loads with kernels, and streams that are kept"),
    "designs": (designs, 75, "which switches become defaults"),
    "models": (models, 30, "where loads of many tensors spend their time"),
}
TESTS = (("load", "core"), ("save", "checkpoint"))
WORKERS = 8
# Folders that are removed at the end, and the variables that lead there.
SCRATCH = {
    "files": ["XDG_CACHE_HOME", "HYPOTHESIS_STORAGE_DIRECTORY", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "MPLCONFIGDIR"],
    "scratch": ["TMPDIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"],
}


class Step(NamedTuple):
    """Process of a command, with its time limit in seconds."""

    name: str
    seconds: float
    command: Sequence[str]


def steps_of(what: str, out: Path, options: Sequence[str]) -> list[Step]:
    """Returns the steps of a command, in the order of their value."""
    if what == "1":
        command = [sys.executable, "-m", "fst_bench.experiments", *options]
        return [Step(name, limit, [*command, name, str(out)]) for name, (_, limit, _) in EXPERIMENTS.items()]
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={CHECKOUT}"]
    tests += ["-c", str(CHECKOUT / "pyproject.toml"), f"--basetemp={out / 'scratch' / 'pytest'}"]
    steps = [
        Step(f"tests-{'-'.join(names)}", 100, [*tests, *_parallel(), *(_tests(name) for name in names)])
        for names in TESTS
    ]
    folders = [f"--out={out / 'figures'}", f"--report={out / 'figures'}", f"--cache-dir={out / 'files'}"]
    figures = ["--device=cuda", "--no-install", "--workloads=dense,moe,adapter", "--actions=load", "--states=warm"]
    peers = ["--peers=fst,safetensors,instanttensor", "--ceilings=none", "--gib=2", "--minutes=1.3"]
    return [*steps, Step("figures", 95, [sys.executable, "-m", "fst_bench", *figures, *peers, *folders])]


def _tests(folder: str) -> str:
    return str(CHECKOUT / "tests" / "python" / folder)


def _parallel() -> list[str]:
    try:
        import xdist  # noqa: F401
    except ImportError:
        return []
    return ["--numprocesses", str(WORKERS), "--dist", "loadfile"]


def run_steps(what: str, steps: Sequence[Step], out: Path, budget: float | None = None) -> dict[str, str]:
    """Runs steps within the budget of a command. Returns what went wrong with each, or an empty text.

    The output of a step is in `STEP.log`. `lease-N.json` lists the steps so far.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + (budget or BUDGETS[what])
    environment = _environment(out)
    record: dict[str, Any] = {
        "commit": commit(),
        "begin": time.strftime("%Y-%m-%d %H:%M:%S"),
        "card": _card(),
        "steps": [],
    }
    try:
        for step in steps:
            started = time.monotonic()
            limit = min(step.seconds, end - started)
            status = _run(step, limit, out, environment) if limit >= 1 else "no time was left"
            seconds = round(time.monotonic() - started, 1)
            record["steps"].append({"name": step.name, "seconds": seconds, "status": status})
            _write(out / f"lease-{what}.json", record)
            print(f"{step.name}: {status or 'done'} after {seconds} s", flush=True)
    finally:
        for folder in SCRATCH:
            shutil.rmtree(out / folder, ignore_errors=True)
    return {step["name"]: step["status"] for step in record["steps"]}


def _card() -> str:
    """Returns the name of the GPU, the version of the driver and the link, or an empty text."""
    facts = "name,driver_version,pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return ""


def _environment(out: Path) -> dict[str, str]:
    environment = plain_environment() | {"FST_REQUIRE_GPU": "1", "PYTHONDONTWRITEBYTECODE": NO_BYTECODE}
    for folder, variables in SCRATCH.items():
        (out / folder).mkdir(exist_ok=True)
        environment |= dict.fromkeys(variables, str(out / folder))
    return environment


def _run(step: Step, limit: float, out: Path, environment: Mapping[str, str]) -> str:
    """Runs a step, ends all of its processes, and returns what went wrong."""
    with (out / f"{step.name}.log").open("wb") as log:
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(step.command, env=environment, cwd=out, start_new_session=True, **output)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"ended after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit status {status}" if status else ""


def run_experiment(name: str, context: Context, out: Path) -> None:
    """Runs an experiment, and writes its rows so far to `NAME.json` after each, with the parameters that they set."""
    experiment, _, decides = EXPERIMENTS[name]
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"decides": decides, "rows": [], "parameters": {}}
    print(f"{name}, which decides: {decides}", flush=True)
    try:
        for row in experiment(context):
            record["rows"].append(row)
            if row["parameter"]:
                record["parameters"][row["parameter"]] = float(f"{median(row['values']):.4g}")
            _write(out / f"{name}.json", record)
            print(_summary(row), flush=True)
    except (DriverError, OSError) as error:
        record["error"] = str(error)
        _write(out / f"{name}.json", record)
        sys.exit(f"{name}: {error}")


def _summary(row: Mapping[str, Any]) -> str:
    values = row["values"]
    if not values:
        return str(row["what"])
    return f"{median(values):10.2f} {row['unit']:5} [{min(values):.2f} .. {max(values):.2f}]  {row['what']}"


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a file of JSON as a whole, so that it is complete whenever the machine is lost."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
