"""Nested dictionaries and lists of tensors, and the names that their leaves have in a file.

A leaf is found by a path: the keys and indices that lead to it. A path that is a single key is its own name; any other
is the JSON list of its parts behind a record separator, a character that no ordinary name begins with.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Key = str | int
Path = tuple[Key, ...]
# A name, or for a tensor that is nested its path.
FilterFuncType = Callable[[str | Sequence[Key]], Any]

_Leaf = TypeVar("_Leaf")
_MARK = "\x1e"


def name_of(path: Path) -> str:
    """The name in a file of the leaf at a path."""
    if len(path) == 1 and isinstance(path[0], str) and not path[0].startswith(_MARK):
        return path[0]
    return _MARK + json.dumps(path, separators=(",", ":"))


def path_of(name: str) -> Path:
    """The path of the leaf that has this name in a file. No two names have the same."""
    if name.startswith(_MARK):
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
    """A path as people see it: a single key alone."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def leaves(tree: Any, leaf: type[_Leaf], path: Path = ()) -> Iterator[tuple[Path, _Leaf]]:
    """The leaves with their paths. Raises TypeError for what is no leaf, mapping with str keys or sequence."""
    if isinstance(tree, leaf):
        yield path, tree
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = tree.items()
        for key in tree:
            if not isinstance(key, str):
                raise TypeError(f"keys must be str, and {key!r} at {list(path)} is {type(key).__name__}")
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        items = enumerate(tree)
    else:
        raise TypeError(
            f"what is written must be a {leaf.__name__}, a mapping or a sequence, and at {list(path)} there is "
            f"{type(tree).__name__}"
        )
    for key, branch in items:
        yield from leaves(branch, leaf, (*path, key))


def insert(tree: dict[Key, Any], path: Path, leaf: Any) -> None:
    """Puts a leaf into a tree of dictionaries. Raises ValueError where another leaf or branch is in its way."""
    branch = tree
    for depth, key in enumerate(path):
        if branch and type(next(iter(branch))) is not type(key):
            raise ValueError(f"{shown(path)!r} has {key!r} where other names have {next(iter(branch))!r}")
        if depth == len(path) - 1:
            if key in branch:
                raise ValueError(f"there is already something at {shown(path)!r}")
            branch[key] = leaf
        else:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{shown(path)!r} leads through another tensor, at {list(path[: depth + 1])}")


def remove(tree: dict[Key, Any], path: Path) -> None:
    """Takes a leaf out of a tree of dictionaries again."""
    *way, key = path
    branch = tree
    for part in way:
        branch = branch[part]
    del branch[key]


def with_lists(tree: Any) -> Any:
    """The tree with a list, in the order of its indices, in place of each dictionary that has indices for keys."""
    if not isinstance(tree, dict):
        return tree
    branches = {key: with_lists(branch) for key, branch in tree.items()}
    if branches and isinstance(next(iter(branches)), int):
        return [branches[index] for index in sorted(branches)]
    return branches
