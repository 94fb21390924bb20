"""Writes the reference of fst/fst.h: each public declaration with the comment before it."""

import re
from collections.abc import Iterator


def header_page(source: str) -> str:
    """Returns the comment of the header, and each public declaration with the comment before it."""
    introduction, _, rest = source.partition("#pragma once")
    body = rest[rest.index("inline api {") :]
    body = body[: body.index("namespace detail")] + body[body.index("}  // namespace detail") :]
    lines = ["# fst/fst.h", "", *_comment(introduction.splitlines())]
    for name, comment, declaration in _declarations(body.splitlines()[1:]):
        lines += ["", f"## {name}", "", "```cpp", *declaration, "```", "", *_comment(comment)]
    return "\n".join(lines) + "\n"


def _comment(lines: list[str]) -> list[str]:
    return [line.removeprefix("//").removeprefix(" ") for line in lines if line.startswith("//")]


def _declarations(lines: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields name, comment and declaration of each function and type that begins in the first column."""
    comment: list[str] = []
    rest = iter(lines)
    for line in rest:
        if line.startswith("//"):
            comment.append(line)
            continue
        if line.startswith(("inline ", "struct ", "class ", "enum ", "using ")):
            block = [line]
            while block[-1] not in ("}", "};") and not (line.endswith(";") and len(block) == 1):
                block.append(next(rest))
            if line.startswith("inline "):
                text = "\n".join(block).partition(" {\n")[0].removeprefix("inline ") + ";"
                # Later lines are aligned with the parameters of the first.
                lines_of_text = text.replace("\n" + " " * len("inline "), "\n").splitlines()
                yield re.findall(r"(\w+)\(", text)[0], comment, lines_of_text
            else:
                yield line.removeprefix("enum ").split()[1], comment, _interface(block)
        comment = []


def _interface(lines: list[str]) -> list[str]:
    """Returns a type without its private members and the bodies of its functions."""
    kept: list[str] = []
    rest = iter(lines)
    for line in rest:
        if line == " private:":
            break
        is_function = line.startswith("  ") and line[2] not in " /}" and "(" in line
        if not is_function:
            kept.append(line)
            continue
        kept.append(re.sub(r" \{( .*)?$", "", line) + ";")
        if not line.endswith(" }"):
            while line != "  }":
                line = next(rest)
    # A blank line stands before the private members.
    return [*kept[:-1], "};"] if line == " private:" else kept
