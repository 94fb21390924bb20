"""Two commands that use a GPU for minutes: each step has its own process and time limit, and keeps its results at once.

A step that fails or hangs costs only itself. The most valuable steps come first, because a machine may be lost at any
time. Nothing is written outside of the output folder. At the end, it has two small files for each command, since what
comes back from a rented machine may be limited: `lease-N.json` with all results, and `lease-N.log` with all output.
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
# Seconds that a step gets after SIGINT, at most: pytest then prints the failures so far.
GRACE_SECONDS = 5
# Characters of the output of a step that are kept, and printed.
KEPT, PRINTED = 500_000, 2500
# Each experiment with its time limit in seconds, and the decision that its rows drive.
EXPERIMENTS: dict[str, tuple[Callable[[Context], Rows], int, str]] = {
    "probe": (
        probe,
        35,
        "whether PyTorch finds the GPU, and whether slots get huge pages",
    ),
    "reads": (reads, 30, "whether reads or the link bound a second load, and slots that stay in L3"),
    "files": (files, 20, "nothing: it writes the files of the next experiments"),
    "loads": (loads, 60, "what all others are compared with"),
    "allocation": (allocation, 25, "windows, beside which tensors are allocated"),
    "launches": (launches, 30, "whether fst.warm_up loads what the first kernel needs"),
    "starts": (starts, 5, "whether a load may start its threads more than once"),
    "copies": (copies, 40, "one stream or two, an event after each copy, and the size of chunks"),
    "registration": (registration, 40, "huge pages for slots, one registration at a time, fst.warm_up"),
    "waits": (waits, 15, "how workers wait for a slot"),
    "objects": (objects, 10, "the module only for loads with kernels, and streams that are kept"),
    "designs": (designs, 80, "which switches become defaults"),
    "models": (models, 30, "where loads of many tensors spend their time"),
}
TESTS = (("load", "core"), ("save", "checkpoint"))
# What a dry run on the CPU tests instead, since it only has to show that tests run.
SMALL_TESTS = {"load": "core/test_formatting.py", "save": "save/test_shards.py"}
WORKERS = 8
# Folders of the work that are not kept, and the variables that lead there.
SCRATCH = {
    "files": ["XDG_CACHE_HOME", "HYPOTHESIS_STORAGE_DIRECTORY", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "MPLCONFIGDIR"],
    "scratch": ["TMPDIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"],
}


class Step(NamedTuple):
    """Process of a command, with its time limit in seconds."""

    name: str
    seconds: float
    command: Sequence[str]


def work_of(out: Path) -> Path:
    """Returns the folder in which steps work, which is removed at the end."""
    return out / "work"


def steps_of(what: str, out: Path, options: Sequence[str]) -> list[Step]:
    """Returns the steps of a command, in the order of their value."""
    work = work_of(out)
    if what == "1":
        command = [sys.executable, "-m", "fst_bench.experiments", *options]
        return [Step(name, limit, [*command, name, str(work)]) for name, (_, limit, _) in EXPERIMENTS.items()]
    is_small = "--small" in options
    tests = [sys.executable, "-m", "pytest", "-m", "not gpu" if is_small else "gpu", "--tb=short", "--durations=5"]
    # A file that cannot be imported, for lack of a library, costs only its own tests.
    tests += ["--continue-on-collection-errors", "-p", "no:cacheprovider", f"--rootdir={CHECKOUT}"]
    tests += ["-c", str(CHECKOUT / "pyproject.toml"), f"--basetemp={work / 'scratch' / 'pytest'}"]
    steps = []
    for names in TESTS:
        chosen = [SMALL_TESTS[names[0]]] if is_small else names
        paths = [str(CHECKOUT / "tests" / "python" / name) for name in chosen]
        steps.append(Step(f"tests-{'-'.join(names)}", 100, [*tests, *([] if is_small else _parallel()), *paths]))
    folders = [f"--out={work / 'figures'}", f"--report={work / 'figures'}", f"--cache-dir={work / 'files'}"]
    amount = ["--device=cuda", "--workloads=dense,moe,adapter", "--peers=fst,safetensors,instanttensor", "--gib=2"]
    if is_small:
        amount = ["--device=cpu", "--workloads=adapter", "--peers=fst", "--gib=0.01", "--rounds=1"]
    figures = ["--no-install", "--actions=load", "--states=warm", "--ceilings=none", "--minutes=1.3"]
    return [*steps, Step("figures", 95, [sys.executable, "-m", "fst_bench", *figures, *amount, *folders])]


def _parallel() -> list[str]:
    try:
        import xdist  # noqa: F401
    except ImportError:
        return []
    return ["--numprocesses", str(WORKERS)]


def run_steps(what: str, steps: Sequence[Step], out: Path, budget: float | None = None) -> dict[str, str]:
    """Runs steps within the budget of a command. Returns what went wrong with each, or an empty text."""
    end = time.monotonic() + (budget or BUDGETS[what])
    work = work_of(out)
    work.mkdir(parents=True, exist_ok=True)
    environment = _environment(work)
    record: dict[str, Any] = {
        "commit": commit(),
        "begin": time.strftime("%Y-%m-%d %H:%M:%S"),
        "card": _card(),
        "steps": [],
    }
    try:
        with (out / f"lease-{what}.log").open("w") as log:
            for step in steps:
                started = time.monotonic()
                limit = min(step.seconds, end - started)
                status = _run(step, limit, work, environment) if limit >= 1 else "no time was left"
                seconds = round(time.monotonic() - started, 1)
                results = _results(work, step.name)
                record["steps"].append({"name": step.name, "seconds": seconds, "status": status, "results": results})
                _write(out / f"lease-{what}.json", record)
                output = _text(work / f"{step.name}.log")
                log.write(f"=== {step.name}\n{output}\n")
                log.flush()
                print(f"=== {step.name}: {status or 'done'} after {seconds} s\n{output[-PRINTED:]}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {step["name"]: step["status"] for step in record["steps"]}


def _results(work: Path, name: str) -> dict[str, Any]:
    """Returns what a step has written: its record, or each file of its folder."""
    with suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
        return record
    files = sorted(file for file in (work / name).rglob("*") if file.suffix in (".json", ".md"))
    return {str(file.relative_to(work / name)): _text(file) for file in files}


def _text(path: Path) -> str:
    """Returns the end of a file, or an empty text if there is none."""
    with suppress(OSError):
        return path.read_text(errors="replace")[-KEPT:]
    return ""


def _card() -> str:
    """Returns the name of the GPU, the version of the driver and the link, or an empty text."""
    facts = "name,driver_version,pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return ""


def _environment(work: Path) -> dict[str, str]:
    """Returns the variables of a step, which works in another folder: paths to modules must not be relative."""
    environment = plain_environment() | {"FST_REQUIRE_GPU": "1", "PYTHONDONTWRITEBYTECODE": NO_BYTECODE}
    modules = [Path(path).absolute() for path in environment["PYTHONPATH"].split(os.pathsep)]
    if list((CHECKOUT / "torch_ext" / "fst").glob("libfst_*.so")):
        modules.append(CHECKOUT / "torch_ext")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, modules))
    for folder, variables in SCRATCH.items():
        (work / folder).mkdir(exist_ok=True)
        environment |= dict.fromkeys(variables, str(work / folder))
    return environment


def _run(step: Step, limit: float, work: Path, environment: Mapping[str, str]) -> str:
    """Runs a step, ends all of its processes, and returns what went wrong."""
    grace = min(GRACE_SECONDS, limit / 4)
    with (work / f"{step.name}.log").open("wb") as log:
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(step.command, env=environment, cwd=work, start_new_session=True, **output)
        try:
            status = process.wait(limit - grace)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
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
