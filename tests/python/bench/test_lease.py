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
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    python = [sys.executable, "-S", "-c"]
    steps = [
        Step("hangs", 1, [*python, code]),
        Step("fails", 5, [*python, "print('before'); 1 / 0"]),
        Step("works", 5, [*python, "open('done', 'w')"]),
        Step("is cut", 60, [*python, code]),
        Step("is late", 5, [*python, "open('late', 'w')"]),
    ]
    statuses = run_steps("1", steps, tmp_path, budget=6)
    assert statuses.pop("is cut").startswith("ended after ")
    late = "no time was left"
    assert statuses == {"hangs": "ended after 1 s", "fails": "exit status 1", "works": "", "is late": late}
    assert "before" in (tmp_path / "fails.log").read_text()
    record = json.loads((tmp_path / "lease-1.json").read_text())
    assert {step["name"]: step["status"] for step in record["steps"]}["is late"] == late
    assert sum(step["seconds"] for step in record["steps"]) < 8
    # The processes of a step end with it.
    folders = [link.readlink() for link in Path("/proc").glob("[0-9]*/cwd") if os.access(link, os.R_OK)]
    assert tmp_path not in folders


def test_designs_name_known_switches():
    text = (CHECKOUT / "rust" / "options" / "experiments.rs").read_text()
    switches = {item.split("=")[0] for design in DESIGNS.values() for item in filter(None, design.split(","))}
    assert switches <= set(re.findall(r"\(Switch::\w+, \"(\w+)\"", text))


@pytest.mark.benchmark
def test_dry_run_writes_figures_and_only_below_its_folder(tmp_path, python_environ):
    out, home = tmp_path / "out", tmp_path / "home"
    (tmp_path / "witness").mkdir()
    home.mkdir()
    (tmp_path / "witness" / "sitecustomize.py").write_text(WITNESS)
    path = os.pathsep.join([str(tmp_path / "witness"), python_environ["PYTHONPATH"]])
    environ = python_environ | {"PYTHONPATH": path, "HOME": str(home), "WITNESS": str(tmp_path / "written")}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "fst_bench.experiments", "1", str(out), "--small", f"--driver={DRIVER}"]
    done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + "".join(log.read_text() for log in out.glob("*.log"))
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in EXPERIMENTS}
    assert all(record["rows"] and "error" not in record for record in records.values())
    parameters = {name: value for record in records.values() for name, value in record["parameters"].items()}
    known = {line.split(" = ")[0] for line in (CHECKOUT / "benches" / "h100.toml").read_text().splitlines()}
    assert parameters.keys() <= known
    assert parameters["link_gbps"] > 0 < parameters["readers_gbps"]
    written = {Path(line) for line in (tmp_path / "written").read_text().splitlines()}
    assert any(file.is_relative_to(out / "files") for file in written)
    assert [file for file in written if not file.is_relative_to(out) and file != Path(os.devnull)] == []
    assert list(home.iterdir()) == [] == [folder for folder in out.iterdir() if folder.is_dir()]
