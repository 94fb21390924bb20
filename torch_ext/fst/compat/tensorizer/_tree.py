"""Nested dictionaries and lists of tensors, and the names of their leaves in a file.

The path of a leaf is the sequence of keys and indices that lead to it. The name of a path with a single key is that
key. The name of any other path is a record separator, with which no ordinary name begins, and the path as JSON list.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Key = str | int
Path = tuple[Key, ...]
# Takes the name of a tensor, or the path of a nested tensor.
FilterFuncType = Callable[[str | Sequence[Key]], Any]

_RECORD_SEPARATOR = "\x1e"


def name_of(path: Path) -> str:
    """Returns the name in a file of the leaf at a path."""
    if len(path) == 1 and isinstance(path[0], str) and not path[0].startswith(_RECORD_SEPARATOR):
        return path[0]
    return _RECORD_SEPARATOR + json.dumps(path, separators=(",", ":"))


def path_of(name: str) -> Path:
    """Returns the path of the leaf with this name in a file. Different names have different paths."""
    if name.startswith(_RECORD_SEPARATOR):
        try:
            parts = json.loads(name[1:])
        except ValueError:
            return (name,)
        if isinstance(parts, list) and parts and all(map(_is_key, parts)) and name_of(tuple(parts)) == name:
            return tuple(parts)
    return (name,)


def _is_key(part: Any) -> bool:
    return isinstance(part, str) or (type(part) is int and part >= 0)


def shown(path: Path) -> str | Path:
    """Returns a path as it is shown to users: a single key is not wrapped in a tuple."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields paths and tensors. Raises TypeError for a node that is no tensor, mapping with str keys, or sequence."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = tree.items()
        for key in tree:
            if not isinstance(key, str):
                raise TypeError(f"keys must be str, but {key!r} at {list(path)} is of type {type(key).__name__}")
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        items = enumerate(tree)
    else:
        raise TypeError(f"expected a Tensor, a mapping or a sequence at {list(path)}, not {type(tree).__name__}")
    for key, branch in items:
        yield from leaves(branch, (*path, key))


def insert(tree: dict[Key, Any], path: Path, leaf: Any) -> None:
    """Inserts a leaf into a tree of dictionaries. Raises ValueError if the path conflicts with another leaf."""
    branch = tree
    for depth, key in enumerate(path):
        if branch and type(next(iter(branch))) is not type(key):
            raise ValueError(
                f"{shown(path)!r} has {key!r} where other names have {next(iter(branch))!r}; "
                "keys and indices cannot be mixed"
            )
        if depth == len(path) - 1:
            if key in branch:
                raise ValueError(f"{shown(path)!r} already exists")
            branch[key] = leaf
        else:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{shown(path)!r} leads through another tensor, at {list(path[: depth + 1])}")


def remove(tree: dict[Key, Any], path: Path) -> None:
    """Removes a leaf from a tree of dictionaries."""
    *parents, key = path
    branch = tree
    for part in parents:
        branch = branch[part]
    del branch[key]


def with_lists(tree: Any) -> Any:
    """Returns the tree with dictionaries whose keys are indices replaced by lists, in the order of the indices."""
    if not isinstance(tree, dict):
        return tree
    branches = {key: with_lists(branch) for key, branch in tree.items()}
    if branches and isinstance(next(iter(branches)), int):
        return [branches[index] for index in sorted(branches)]
    return branches
