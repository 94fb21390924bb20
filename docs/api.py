"""Writes docs/api/: the reference of the Python package, of the operators and of the header for C++.

    make docs

Reads docstrings, comments and schemas from the sources. It needs neither PyTorch nor the library, and the result does
not depend on their versions.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = CHECKOUT / "docs" / "api"
PYTHON = CHECKOUT / "torch_ext"
OPERATORS = CHECKOUT / "csrc" / "ops.cpp"
HEADER = CHECKOUT / "torch_ext" / "fst" / "include" / "fst" / "fst.h"
MODULES = (
    "fst",
    "fst.torch",
    "fst.numpy",
    "fst.storage",
    "fst.dcp",
    "fst.compat.fastsafetensors",
    "fst.compat.instanttensor",
    "fst.compat.tensorizer",
    "fst.compat.unifiedefficientloader",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Sections of docstrings, of which the first have entries.
ENTRIES = ("Args", "Attributes", "Raises")
SECTION = re.compile(rf"^({'|'.join(ENTRIES)}|Returns|Yields|Example):$")
# Functions that are also arguments, which docstrings mean more often.
ARGUMENTS = {"metadata", "verify"}
ENTRY = re.compile(r"(\*{0,2}[\w.]+(?:, [\w.]+)*): ")


def write(folder: Path = PAGES) -> None:
    """Writes all pages into a folder, and removes others."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)


def pages() -> dict[str, str]:
    """Returns the text of each page by its name."""
    made = {f"{module}.md": python_page(module) for module in MODULES}
    made["operators.md"] = operators_page(OPERATORS.read_text())
    made["cpp.md"] = cpp_page(HEADER.read_text())
    rows = [f"| [`{module}`]({module}.md) | {_first_sentence(_tree(module))} |" for module in MODULES]
    rows.append("| [operators](operators.md) | Schemas of `torch.ops.fst`. |")
    rows.append("| [C++](cpp.md) | Functions and types of `fst/fst.h`. |")
    made["README.md"] = "\n".join(
        [
            "# Reference",
            "",
            "`make docs` writes these pages from the docstrings, the schemas and the header.",
            "",
            "| page | subject |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    return made


# The Python package.


@dataclass(frozen=True)
class Name:
    """Public name of a module, where it is defined.

    Attributes:
        name: The name.
        module: Module that defines it.
        nodes: Definitions: one, or several of an overloaded function, of which the last one has the docstring. Empty
            for a module.
    """

    name: str
    module: str
    nodes: tuple[ast.stmt, ...]

    @property
    def is_class(self) -> bool:
        return bool(self.nodes) and isinstance(self.nodes[-1], ast.ClassDef)

    @property
    def heading(self) -> str:
        # Some functions have the name of a class in lower case, and headings differ in more than the case.
        return f"class {self.name}" if self.is_class else self.name


def python_page(module: str) -> str:
    tree = _tree(module)
    documented = _documented(module)
    anchors = _anchors(module)
    lines = [f"# {module}", "", *_text(ast.get_docstring(tree) or ""), "", "| name | |", "|---|---|"]
    for name in _public(module):
        lines.append(f"| {_reference(module, name, anchors)} | {_summary(name)} |")
    for name in documented:
        lines += ["", f"## {name.heading}", "", *_documentation(name)]
    if used := _names_in_signatures(documented):
        lines += ["", "## Names in signatures", "", "```python", *used, "```"]
    links = {f"fst.{name}": f"fst.md#{anchor}" for name, anchor in _anchors("fst").items()}
    links |= {name: f"#{anchor}" for name, anchor in anchors.items() if name not in ARGUMENTS}
    return _page(_link(lines, links))


def _page(lines: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


@cache
def _source(module: str) -> str:
    path = PYTHON.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _public(module: str) -> list[Name]:
    """Returns the names in `__all__`."""
    [names] = [
        ast.literal_eval(node.value)
        for node in _tree(module).body
        if isinstance(node, ast.Assign) and "__all__" in _defined(node)
    ]
    return [find(module, name) for name in names]


def _documented(module: str) -> list[Name]:
    """Returns the public functions and classes, which have sections of their own."""
    return [name for name in _public(module) if name.nodes and not isinstance(name.nodes[-1], ast.Assign)]


def _anchors(module: str) -> dict[str, str]:
    return {name.name: _anchor(name.heading) for name in _documented(module)}


def find(module: str, name: str) -> Name:
    """Finds the definition of a name that a module defines or imports."""
    tree = _tree(module)
    nodes = tuple(node for node in tree.body if name in _defined(node))
    if nodes:
        return Name(name, module, nodes)
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fst"):
            continue
        source = str(node.module)
        for alias in node.names:
            if name == (alias.asname or alias.name):
                inner = PYTHON.joinpath(*source.split("."), alias.name)
                if inner.is_dir() or inner.with_suffix(".py").is_file():
                    return Name(name, f"{source}.{alias.name}", ())
                found = find(source, alias.name)
                return Name(name, found.module, found.nodes)
    raise ValueError(f"{module} does not define {name}")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _reference(module: str, name: Name, anchors: dict[str, str]) -> str:
    if name.name in anchors:
        return f"[`{name.name}`](#{anchors[name.name]})"
    page = f"{name.module}.md"
    is_page = not name.nodes and name.module in MODULES and name.module != module
    return f"[`{name.name}`]({page})" if is_page else f"`{name.name}`"


def _summary(name: Name) -> str:
    """Returns the first sentence of a docstring, or the comment before a constant."""
    if not name.nodes:
        return _first_sentence(_tree(name.module))
    node = name.nodes[-1]
    if isinstance(node, Function | ast.ClassDef):
        return _first_sentence(node)
    before = _source(name.module).splitlines()[: node.lineno - 1]
    comment: list[str] = []
    while before and before[-1].startswith("# "):
        comment.insert(0, before.pop().removeprefix("# "))
    return " ".join(comment)


def _first_sentence(node: ast.Module | Function | ast.ClassDef) -> str:
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return re.split(r"(?<=[.])\s", paragraph.replace("\n", " "), maxsplit=1)[0]


def _documentation(name: Name) -> Iterator[str]:
    """Yields the signatures and docstring of a function, or of a class and its public methods."""
    node = name.nodes[-1]
    if isinstance(node, Function):
        overloads = [each for each in name.nodes if isinstance(each, Function) and each.decorator_list]
        yield from _signatures(name.module, overloads or [node], name.name)
        yield from _text(ast.get_docstring(node) or "")
    elif isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, Function)]
        made = [method for method in methods if method.name == "__init__"]
        yield from _signatures(name.module, made, name.name)
        yield from _text(ast.get_docstring(node) or "")
        for method in made:
            yield from _text(ast.get_docstring(method) or "")
        for method in methods:
            if not method.name.startswith("_") and not _is_setter(method):
                yield from ["", f"### {name.name}.{method.name}", ""]
                yield from _signatures(name.module, [method], method.name)
                yield from _text(ast.get_docstring(method) or "")


def _is_setter(method: Function) -> bool:
    return any(isinstance(decorator, ast.Attribute) for decorator in method.decorator_list)


def _signatures(module: str, nodes: list[Function], name: str) -> Iterator[str]:
    """Yields the signatures as they are in the source, without `self` and `cls`."""
    if not nodes:
        return
    yield "```python"
    for node in nodes:
        lines = _source(module).splitlines()[node.lineno - 1 : max(node.lineno, node.body[0].lineno - 1)]
        text = textwrap.dedent("\n".join(lines)).removesuffix(" ...").rstrip().removesuffix(":")
        text = re.sub(r"\((\s*)(?:self|cls)(?:, |,\n +|(?=\)))", r"(\1", text, count=1)
        if node.name == "__init__":
            text = text.replace("def __init__", name, 1).removesuffix(" -> None")
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        yield from (f"@{each}" for each in decorators if each in ("property", "classmethod", "staticmethod"))
        yield text
    yield from ["```", ""]


def _names_in_signatures(names: list[Name]) -> list[str]:
    """Returns the definitions of the type aliases and constants of fst in signatures, and of those that these use."""
    found: dict[str, str] = {}

    def collect(module: str, expression: ast.expr) -> None:
        for part in ast.walk(expression):
            if not isinstance(part, ast.Name) or part.id in found:
                continue
            try:
                alias = find(module, part.id)
            except ValueError:
                continue
            node = alias.nodes[-1] if alias.nodes else None
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
                # Definitions come before those that use them.
                collect(alias.module, node.value)
                found[part.id] = ast.get_source_segment(_source(alias.module), node) or ""

    for name in names:
        for part in ast.walk(name.nodes[-1]):
            if isinstance(part, ast.arguments):
                arguments = [*part.posonlyargs, *part.args, *part.kwonlyargs]
                used = [*(each.annotation for each in arguments), *part.defaults, *part.kw_defaults]
                for expression in filter(None, used):
                    collect(name.module, expression)
    return list(found.values())


def _text(docstring: str) -> Iterator[str]:
    """Yields a docstring as Markdown."""
    title, block = "", list[str]()
    for line in [*docstring.splitlines(), "Returns:"]:
        if found := SECTION.match(line):
            yield from _section(title, textwrap.dedent("\n".join(block)).strip("\n"))
            title, block = found[1], []
        else:
            block.append(line)


def _section(title: str, text: str) -> Iterator[str]:
    if not text:
        return
    if title == "Example":
        yield from ["**Example**", "", "```python", text, "```", ""]
    elif title in ENTRIES:
        yield from [f"**{title}**", "", *_entries(text), ""]
    elif title:
        yield from [f"**{title}**", "", text, ""]
    else:
        yield from [text, ""]


def _entries(text: str) -> Iterator[str]:
    """Yields the entries of a section as a list. Lines of an entry are indented, but not of one without a name."""
    is_named = True
    for line in text.splitlines():
        found = ENTRY.match(line)
        if found:
            named = ", ".join(f"`{name}`" for name in found[1].split(", "))
            yield f"- {named}: {line[found.end() :]}"
            is_named = True
        elif line.startswith(" ") or not line:
            yield line.removeprefix("    ") and f"  {line.removeprefix('    ')}"
        else:
            yield f"- {line}" if is_named else f"  {line}"
            is_named = False


def _link(lines: Iterable[str], links: dict[str, str]) -> Iterator[str]:
    """Makes links of names and of other pages, outside of blocks of code, headings and tables."""
    is_code = False
    for line in "\n".join(lines).splitlines():
        is_code ^= line.startswith("```")
        if not is_code and not line.startswith(("#", "|", "    ")):
            line = re.sub(r"\bdocs/([\w-]+\.md)\b", r"[docs/\1](../\1)", line)
            line = re.sub(
                r"`([\w.]+)`(?!: )",
                lambda found: f"[{found[0]}]({links[found[1]]})" if found[1] in links else found[0],
                line,
            )
        yield line


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


# The operators.


def operators_page(source: str) -> str:
    """Returns the schemas in the source. Names with an underscore are those of the Python package only."""
    strings = r'((?:\s*"(?:[^"\\]|\\.)*")+)'
    [common] = re.findall(rf"def_io\(own \+{strings}", source)
    # The schemas of loads are the arguments of their own, the common ones and the result.
    loads = re.sub(rf"def_load\({strings},{strings}\);", rf"def_io(\1 {common} \2);", source)
    schemas = [ast.literal_eval(f"({found})") for found in re.findall(rf"def(?:_io)?\({strings}\s*[,)]", loads)]
    public = [schema for schema in schemas if "->" in schema and not schema.startswith("_")]
    lines = [
        "# Operators",
        "",
        "Schemas of the operators in `torch.ops.fst`, for TorchScript, `torch.compile`, `torch.export`, AOTInductor",
        "and programs without Python. The function of [`fst`](fst.md) with the same name documents each. `verify` is",
        'empty, `"digests"`, or the path or JSON text of a manifest. Operators that return a `Dict` run in eager',
        "PyTorch and in TorchScript only.",
        "",
        "```text",
        *(f"fst::{schema}" for schema in public),
        "```",
    ]
    return _page(lines)


# The header for C++.


def cpp_page(source: str) -> str:
    """Returns the comment of the header, and each public declaration with the comment before it."""
    introduction, _, rest = source.partition("#pragma once")
    body = rest[rest.index("inline api {") :]
    body = body[: body.index("namespace detail")] + body[body.index("}  // namespace detail") :]
    lines = ["# fst/fst.h", "", *_comment(introduction.splitlines())]
    for name, comment, declaration in _declarations(body.splitlines()[1:]):
        lines += ["", f"## {name}", "", "```cpp", *declaration, "```", "", *_comment(comment)]
    return _page(lines)


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


if __name__ == "__main__":
    write()
