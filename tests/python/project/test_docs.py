"""Runs every example of the docs and docstrings, and checks the links."""

import doctest
import importlib
import importlib.util
import inspect
import linecache
import re
import shlex
import subprocess

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fst
import fst.dcp
import fst.numpy
import fst.torch
from fst import cli
from suite import CHECKOUT

GLOBALS = {"fst": fst, "torch": torch}
# Public functions, each of which has an example, and classes and methods with examples.
EXAMPLES = {
    test.name: test
    for module in (fst, fst.dcp, fst.numpy, fst.torch, fst.storage)
    for name in module.__all__
    if inspect.isfunction(item := getattr(module, name)) or inspect.isclass(item)
    for test in doctest.DocTestFinder(exclude_empty=False).find(item, f"{module.__name__}.{name}", globs=GLOBALS)
    if test.examples or inspect.isfunction(item)
}
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = (*(CHECKOUT / name for name in ROOT_PAGES), *sorted((CHECKOUT / "docs").rglob("*.md")))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
# Blocks in these languages are not run: output of programs, and entries of a Cargo.toml.
NOT_RUN = {"json", "text", "toml"}
# Blocks in these languages are parts of programs that test_cpp.py builds. cargo tests the blocks in Rust.
BUILT = {"cmake", "cpp"}
# Commands that build, install and serve, which are not run here.
OTHERS = {".", "cargo", "cmake", "curl", "export", "pip", "python", "sglang", "torchrun", "vllm"}

# Packages without which the examples that import them are not run.
OPTIONAL = ("opentelemetry", "prometheus_client")

# Commands that make the files of an example.
COMMANDS_BEFORE = {
    "fst.Signature": (
        "openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        "openssl ec -in key.pem -pubout -out key.pub",
        "fst sign model.safetensors --private-key key.pem",
    )
}


@pytest.fixture(autouse=True)
def examples_directory(tmp_path, monkeypatch):
    """Runs examples in an empty directory, and ends the process groups that they create."""
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("test", EXAMPLES.values(), ids=EXAMPLES)
def test_docstrings(test):
    save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, "model.safetensors", metadata={"format": "pt"})
    for command in COMMANDS_BEFORE.get(test.name, ()):
        run_command(shlex.split(command))
    assert test.examples
    report: list[str] = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    """Runs the Python and shell examples of a page in order, as one program."""
    names = {"__name__": "example"}
    for number, (language, text) in enumerate(BLOCK.findall(page.read_text())):
        if language == "diff":
            # The examples of the page run without the names of a changed program.
            added = "".join(re.findall(r"^\+(.*\n)", text, re.MULTILINE))
            run_block(added, f"<{page.name}, block {number}>", dict(names))
        elif language == "python":
            if any(f"from {name}" in text and importlib.util.find_spec(name) is None for name in OPTIONAL):
                continue
            run_block(text, f"<{page.name}, block {number}>", names)
        elif language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                run_command(shlex.split(line, comments=True))
        else:
            assert language in NOT_RUN | BUILT


def test_every_public_name_has_a_docstring():
    package = CHECKOUT / "torch_ext" / "fst"
    paths = [*package.glob("[a-z]*.py"), package / "dcp", *package.glob("compat/[a-z]*/")]
    modules = ["fst", *(".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths)]
    found = [getattr(module, name) for module in map(importlib.import_module, modules) for name in module.__all__]
    documented = [item for item in found if inspect.isclass(item) or inspect.isroutine(item)]
    assert [item for item in documented if not item.__doc__] == []


def test_docstrings_describe_all_parameters():
    entry = re.compile(r"^    ((?:\*{0,2}\w+(?:, )?)+): ", re.MULTILINE)
    found, differing = 0, []
    for module in (fst, fst.dcp, fst.numpy, fst.torch, fst.storage):
        for name in module.__all__:
            function = getattr(module, name)
            _, _, arguments = (inspect.getdoc(function) or "").partition("Args:\n")
            if inspect.isfunction(function) and arguments:
                entries = entry.findall(re.split(r"\n\n(?=\w)", arguments)[0])
                described = ", ".join(entries).replace("*", "").split(", ")
                found += 1
                if {*described} != {*inspect.signature(function).parameters}:
                    differing.append(f"{module.__name__}.{name}")
    assert differing == []
    assert found > 30


def run_block(text, place, names):
    # torch.compile and TorchScript read the source of functions.
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    exec(compile(text, place, "exec"), names)


def run_command(words):
    """Runs `fst`. For `make` and other commands, checks that the target or command is known."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        del words[0]
    if not words:
        return
    if words[0] == "fst":
        with pytest.raises(SystemExit) as end:
            cli.main(words[1:])
        assert end.value.code == 0
    elif words[0] == "openssl":
        subprocess.run(words, check=True)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    else:
        assert words[0] in OTHERS


def headings(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links():
    broken = []
    for page in (*PAGES, CHECKOUT / "BENCHMARKS.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            place, _, heading = target.partition("#")
            path = (page.parent / place) if place else page
            if "://" not in target and not (path.exists() and (not heading or heading in headings(path))):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_named_files_exist():
    folders = "benches|csrc|docs|examples|fuzz|rust|tests|torch_ext"
    missing = []
    for page in PAGES:
        # The change log also names files that are gone.
        if page.name != "CHANGELOG.md":
            names = re.findall(rf"`((?:{folders})/[\w./-]*)(?::\w+)?`", page.read_text())
            missing += [f"{page.name}: {name}" for name in names if not (CHECKOUT / name).exists()]
    assert missing == []
