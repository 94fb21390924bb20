"""The names of PyTorch that the package uses exist in the installed release."""

import ast
import importlib
from pathlib import Path

import torch

import fst

PACKAGE = Path(fst.__file__).parent


def used_names(path: Path) -> set[str]:
    """Returns the dotted names that begin with `torch` in a module, as attributes and as imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute):
            parts = [node.attr]
            while isinstance(node.value, ast.Attribute):
                node = node.value
                parts.append(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                names.add(".".join(["torch", *reversed(parts)]))
    return names


def resolve(name: str) -> object:
    """Returns what a dotted name of PyTorch stands for. Raises an error if there is nothing."""
    found: object = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def test_names_exist():
    names = set().union(*map(used_names, PACKAGE.rglob("*.py")))
    assert "torch.Tensor" in names
    missing = {}
    for name in sorted(names):
        try:
            resolve(name)
        except (AttributeError, ImportError) as error:
            missing[name] = str(error)
    assert not missing
