"""Every example that a reader may copy runs as it stands."""

import doctest
import inspect
import re

import pytest
import torch
from safetensors.torch import save_file

import fst
import fst.numpy
import fst.torch
from conftest import CHECKOUT

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (fst, fst.numpy, fst.torch)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
PAGES = [
    page
    for page in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md")))
    if "```python" in page.read_text()
]


@pytest.fixture(autouse=True)
def examples_directory(tmp_path, monkeypatch):
    """The examples write and read `model.safetensors` where they run."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings(name):
    save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, "model.safetensors", metadata={"format": "pt"})
    [test] = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs={"fst": fst, "torch": torch})
    assert test.examples
    report: list[str] = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    """The Python examples of a page are one program."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(program, str(page), "exec"), {"__name__": "example"})
