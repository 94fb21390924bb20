"""Names with variables, as rules have them.

`{k}` stands for a component of a name, or for a part of one. `{*p}` stands for one component or more. Two braces in a
row stand for a brace.
"""

import re
from collections.abc import Callable, Iterable

_TOKEN = re.compile(r"\{\{|\}\}|\{(\*?)([A-Za-z_]\w*)\}|[{}]|[^{}]+")


def renaming(old: str, new: str) -> Callable[[str], str | None]:
    """Returns a function that renames what matches `old` to `new`, and returns `None` for all other names.

    Raises:
        ValueError: A name has a brace that begins no variable, a variable twice, or `new` has one that `old` lacks.
    """
    expression, variables = "", []
    for literal, variable, is_long in _tokens(old):
        if variable is None:
            expression += re.escape(literal)
            continue
        if variable in variables:
            raise ValueError(f"{old!r}: the variable {variable!r} occurs twice; give the second another name")
        variables.append(variable)
        component = r"[^.]+"
        expression += f"(?P<{variable}>{component}(?:\\.{component})*)" if is_long else f"(?P<{variable}>{component})"
    parts = _tokens(new)
    for _, variable, _ in parts:
        if variable is not None and variable not in variables:
            known = ", ".join(f"{{{name}}}" for name in variables) or "no variables"
            raise ValueError(f"{new!r}: {variable!r} is not a variable of {old!r}, which has {known}")
    compiled = re.compile(expression)

    def rename(name: str) -> str | None:
        found = compiled.fullmatch(name)
        if found is None:
            return None
        return "".join(literal if variable is None else found[variable] for literal, variable, _ in parts)

    return rename


def quoted(name: str) -> str:
    """Returns a name as text of a rule that stands for this name only."""
    doubled = name.replace("{", "{{").replace("}", "}}")
    if re.fullmatch(r"[^\s,()=:\"\\]+", doubled):
        return doubled
    escaped = doubled.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def check_unique(names: Iterable[tuple[str, str]]) -> None:
    """Raises a ValueError if two of the pairs of an old and a new name have the same new name."""
    origin: dict[str, str] = {}
    for old, new in names:
        if origin.setdefault(new, old) != old:
            raise ValueError(f'"{origin[new]}" and "{old}" would both be "{new}"; nothing was written')


def _tokens(text: str) -> list[tuple[str, str | None, bool]]:
    """Splits a name into literal texts and variables, each with whether it stands for several components."""
    tokens: list[tuple[str, str | None, bool]] = []
    for found in _TOKEN.finditer(text):
        token = found[0]
        if found[2] is not None:
            tokens.append(("", found[2], bool(found[1])))
        elif token in ("{", "}"):
            raise ValueError(f"{text!r}: a single {token!r} at character {found.start() + 1}; double it for a brace")
        else:
            tokens.append((token.replace("{{", "{").replace("}}", "}"), None, False))
    return tokens
