"""Commands for a rented GPU: a dry run on the simulated driver, steps that fail or hang, and what is written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fst_bench.experiments.lease import BUDGETS, EXPERIMENTS, Step, run_steps, steps_of
from fst_bench.experiments.loads import DESIGNS
from suite import CHECKOUT

# `make rust-tests` builds it.
DRIVER = Path(os.environ.get("CARGO_TARGET_DIR", CHECKOUT / "target")) / "debug" / "deps" / "libfst_simcuda.so"
# Python writes down each file that it opens for writing, makes, moves or removes.
WITNESS = """
import os, sys
log = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hook(event, arguments):
    is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    # shutil.rmtree names files by their folders, which it has opened.
    is_change = event in ("os.mkdir", "os.rename") or event == "os.remove" and arguments[1] == -1
    if (is_write or is_change) and not isinstance(arguments[0], int):
        os.write(log, f"{os.path.abspath(os.fspath(arguments[0]))}\\n".encode())
sys.addaudithook(hook)
"""


@pytest.mark.parametrize("what", BUDGETS)
def test_steps_fit_the_budget(what, tmp_path):
    assert sum(step.seconds for step in steps_of(what, tmp_path, [])) <= BUDGETS[what]


def test_a_step_that_fails_or_hangs_costs_only_itself(tmp_path):
    # It ignores the SIGINT with which pytest would print its failures.
    code = "import signal, subprocess, sys; signal.signal(2, signal.SIG_IGN); "
    code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    told = "import time\ntry: time.sleep(60)\nfinally: print('failures so far')"
    python = [sys.executable, "-S", "-c"]
    steps = [
        Step("hangs", 1, [*python, code]),
        Step("is told", 1, [*python, told]),
        Step("fails", 5, [*python, "print('before'); 1 / 0"]),
        Step("works", 5, [*python, "print('{}', file=open('works.json', 'w'))"]),
        Step("is cut", 60, [*python, code]),
        Step("is late", 5, [*python, "open('late', 'w')"]),
    ]
    statuses = run_steps("1", steps, tmp_path, budget=6)
    assert statuses.pop("is cut").startswith("ended after ")
    late, ended = "no time was left", "ended after 1 s"
    expected = {"hangs": ended, "is told": ended, "fails": "exit status 1", "works": "", "is late": late}
    assert statuses == expected
    log = (tmp_path / "lease-1.log").read_text()
    assert {"before", "failures so far"} <= set(log.splitlines())
    record = json.loads((tmp_path / "lease-1.json").read_text())
    assert {step["name"]: step["status"] for step in record["steps"]}["is late"] == late
    assert sum(step["seconds"] for step in record["steps"]) < 8
    # The processes of a step end with it, and only small files are left.
    folders = [link.readlink() for link in Path("/proc").glob("[0-9]*/cwd") if os.access(link, os.R_OK)]
    assert not any(str(folder).startswith(str(tmp_path)) for folder in folders)
    assert {path.name for path in tmp_path.iterdir()} == {"lease-1.json", "lease-1.log"}


def test_designs_name_known_switches():
    text = (CHECKOUT / "rust" / "options" / "experiments.rs").read_text()
    texts = [design.get("FST_EXPERIMENTS", "") for design in DESIGNS.values()]
    switches = {item.split("=")[0] for text in texts for item in filter(None, text.split(","))}
    assert switches <= set(re.findall(r"\(Switch::\w+, \"(\w+)\"", text))


@pytest.mark.benchmark
@pytest.mark.parametrize("what", BUDGETS)
def test_dry_run_writes_figures_and_only_below_its_folder(what, tmp_path, python_environ):
    out, home = tmp_path / "out", tmp_path / "home"
    (tmp_path / "witness").mkdir()
    home.mkdir()
    (tmp_path / "witness" / "sitecustomize.py").write_text(WITNESS)
    # As typed on a rented machine, the path is relative.
    path = os.pathsep.join([os.path.relpath(tmp_path / "witness", home), python_environ["PYTHONPATH"]])
    environ = python_environ | {"PYTHONPATH": path, "HOME": str(home), "WITNESS": str(tmp_path / "written")}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "FST_COMMIT": "none"}
    command = [sys.executable, "-m", "fst_bench.experiments", what, str(out), "--small", f"--driver={DRIVER}"]
    done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True)
    log = (out / f"lease-{what}.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    steps = {step["name"]: step for step in json.loads((out / f"lease-{what}.json").read_text())["steps"]}
    # Each step takes less time than its limit, though the machine may have two cores.
    assert sum(step["seconds"] for step in steps.values()) < BUDGETS[what]
    if what == "1":
        results = [steps[name]["results"] for name in EXPERIMENTS]
        assert all(record["rows"] and "error" not in record for record in results)
        parameters = {name: value for record in results for name, value in record["parameters"].items()}
        known = {line.split(" = ")[0] for line in (CHECKOUT / "benches" / "h100.toml").read_text().splitlines()}
        assert parameters.keys() <= known
        assert parameters["link_gbps"] > 0 < parameters["readers_gbps"]
    else:
        assert list(steps) == ["tests-load-core", "tests-save-checkpoint", "figures"]
        assert len(re.findall(r"^=+ \d+ passed.* in ", log, re.MULTILINE)) == 2
        assert any("fst" in text for text in steps["figures"]["results"].values())
    written = {Path(line) for line in (tmp_path / "written").read_text().splitlines()}
    assert any(file.is_relative_to(out / "work" / "files") for file in written)
    assert [file for file in written if not any(map(file.is_relative_to, (out, "/dev/null", "/proc")))] == []
    assert list(home.iterdir()) == []
    assert {path.name for path in out.iterdir()} == {f"lease-{what}.json", f"lease-{what}.log"}
