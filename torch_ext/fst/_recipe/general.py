"""Rules with variables, from rules for single tensors that differ in numbers only."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fst._recipe.names import quoted, renaming

# A component of a name that is a number, such as the number of a layer.
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


class Source(NamedTuple):
    """Right side of a rule, and the names that it reads."""

    text: str
    reads: frozenset[str]


def general_rules(made: Mapping[str, Source], names: Iterable[str]) -> list[str]:
    """Returns rules for outputs by name, given all names of the checkpoint.

    Outputs whose rules differ in components that are numbers get one rule, if it reads no other tensors.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_key(name)].append(name)
    families: dict[str, list[str]] = defaultdict(list)
    for output in made:
        families[_NUMBER.sub("#", output)].append(output)
    rules: list[str] = []
    for outputs in families.values():
        members = [f"{quoted(output)} = {made[output].text}" for output in outputs]
        shared = _general(members) if len(members) > 1 else None
        reads = {name for output in outputs for name in made[output].reads}
        rules += members if shared is None or _reads(shared, alike) != reads else [shared]
    return rules


def _general(rules: list[str]) -> str | None:
    """Returns one rule for rules that differ in components which are numbers, or `None` if there is none."""
    split = [_NUMBER.split(rule) for rule in rules]
    if '"' in rules[0] or len({len(tokens) for tokens in split}) > 1:
        return None
    variables: dict[tuple[str, ...], str] = {}
    tokens = []
    for column in zip(*split, strict=True):
        if len(set(column)) == 1:
            tokens.append(column[0])
        elif all(token.isdigit() for token in column):
            tokens.append(f"{{{variables.setdefault(column, f'n{len(variables)}')}}}")
        else:
            return None
    rule = "".join(tokens)
    output = rule.partition(" = ")[0]
    # Each variable stands on both sides.
    return rule if all(f"{{{variable}}}" in output for variable in variables.values()) else None


def _reads(rule: str, alike: Mapping[str, list[str]]) -> set[str]:
    """Returns the names that a rule reads, of names with the same key."""
    found: set[str] = set()
    for token in re.findall(r"[^\s,()=]+(?![^\s,()=]|\()", rule.partition(" = ")[2]):
        rename = renaming(token, "")
        found |= {name for name in alike.get(_key(token), ()) if rename(name) is not None}
    return found


def _key(name: str) -> str:
    """Returns what names have in common that differ in components which are numbers."""
    return re.sub(r"(?<![^.])(\d+|\{\w+\})(?![^.])", "#", name)
