"""Import direction between the rooms of the Python package, and sizes of the test files."""

import ast
from collections import defaultdict
from pathlib import Path

from suite import CHECKOUT, cycle_of

PACKAGE = CHECKOUT / "torch_ext" / "fst"

# Each room imports itself and rooms before it. `fst` itself (its `__init__`) stands above the private rooms and below
# the public packages.
ROOMS = [
    "_core",
    "_signatures",
    "_recipe",
    "_checkpoint",
    "_deferred",
    "_load",
    "_save",
    "_profile",
    "_ranks",
    "_module",
    "_update",
    "_safetensors_api",
    "torch",
    "numpy",
    "_patch",
    "storage",
    "fst",
    "dcp",
    "compat",
    "plugins",
    "cli",
    "__main__",
]
PRIVATE_ROOMS = {room for room in ROOMS if room.startswith("_")} - {"__main__"}
MAX_ROOMS = 16
MAX_TEST_LINES = 600


def imports(path):
    """Returns the dotted names that a file imports, in functions too. Names imported from `fst` count as modules."""
    inside = ["fst", *path.relative_to(PACKAGE).parts[:-1]] if path.is_relative_to(PACKAGE) else []
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_rooms(path):
    """Returns the rooms of fst that a file imports. A public name of the package itself counts as `fst`."""
    dotted = [name.split(".") for name in imports(path)]
    return {parts[1] if len(parts) > 1 and parts[1] in ROOMS else "fst" for parts in dotted if parts[0] == "fst"}


def files_by_room():
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        files["fst" if room == "__init__" else room].append(path)
    return files


def test_order_names_every_room():
    assert files_by_room().keys() == set(ROOMS)


def test_rooms_import_only_rooms_before_them():
    later = {room: set(ROOMS[index + 1 :]) for index, room in enumerate(ROOMS)}
    files = [(room, path) for room, paths in files_by_room().items() for path in paths]
    used = {path: imported_rooms(path) for _, path in files}
    assert {str(path): above for room, path in files if (above := used[path] & later[room])} == {}
    assert set().union(*used.values()) >= {"fst", *PRIVATE_ROOMS}


def test_no_files_import_each_other():
    """Packages and their own files may."""
    files = {path.relative_to(PACKAGE.parent).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    modules = {file[:-1] if file[-1] == "__init__" else file: path for file, path in files.items()}
    used = {}
    for own, path in modules.items():
        names = [tuple(name.split(".")) for name in imports(path)]
        found = {next((name[:end] for end in range(len(name), 0, -1) if name[:end] in modules), ()) for name in names}
        used[own] = {file for file in found if file and own[: len(file)] != file and file[: len(own)] != own}
    assert cycle_of(used) == []


def test_compat_imports_only_public_names_and_core():
    private = PRIVATE_ROOMS - {"_core"}
    assert {str(path): used for path in files_by_room()["compat"] if (used := imported_rooms(path) & private)} == {}


def test_benches_import_only_public_names():
    files = sorted((CHECKOUT / "benches").rglob("*.py"))
    assert files
    assert {str(path): used for path in files if (used := imported_rooms(path) & PRIVATE_ROOMS)} == {}


def test_top_level_has_few_rooms():
    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert 0 < len(folders) <= MAX_ROOMS


def test_test_files_are_short():
    lines = {path: len(path.read_text().splitlines()) for path in Path(__file__).parents[1].rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > MAX_TEST_LINES} == {}
