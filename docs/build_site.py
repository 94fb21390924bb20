"""Builds the documentation site: python docs/build_site.py OUTPUT

Copies the pages of the repository to OUTPUT/source, writes the reference beside them, and runs Sphinx, which builds
OUTPUT/html. Warnings of Sphinx, such as for a link to a missing page, are errors.
"""

import importlib
import inspect
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from header_page import header_page
from sphinx.cmd.build import main as sphinx_build

import fst
from fst_bench.page import decision_figures, details

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = CHECKOUT / "docs"
FIGURES = DOCS / "decisions" / "figures"
PACKAGE = Path(fst.__path__[0])
ROOT_PAGES = ("README.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Functions and classes in the reference.
DOCUMENTED: list[object] = []
OPERATORS = """# Operators

Schemas of the operators in `torch.ops.fst`, for TorchScript, `torch.compile`, `torch.export`, AOTInductor and programs
without Python. The function of [`fst`](fst.md) with the same name documents each. `verify` is empty, `"digests"`, or
the path or JSON text of a manifest. Operators that return a `Dict` run in eager PyTorch and in TorchScript only.
"""


def main() -> None:
    """Builds the site. Ends with an error if Sphinx warns, or if some file systems take two pages for one."""
    output = Path(sys.argv[1]).resolve()
    source = output / "source"
    for folder in (source, output / "html"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "images", source / "images")
    pages = [*repository_pages(), *section_pages(), *reference_pages()]
    names = Counter(name.lower() for name, _ in pages)
    if max(names.values()) > 1:
        sys.exit(f"pages with names that differ only in case: {names.most_common(1)[0][0]}")
    for name, text in pages:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    options = ["--quiet", "--fail-on-warning", "--fresh-env", "-b", "html"]
    folders = ["-c", str(DOCS), "-d", str(output / "doctrees"), str(source), str(output / "html")]
    sys.exit(sphinx_build([*options, *folders]))


def repository_pages() -> Iterator[tuple[str, str]]:
    """Yields the name and text of each page. The README is the front page, and docs/ is the root."""
    for path in [*(CHECKOUT / name for name in ROOT_PAGES), *DOCS.rglob("*.md")]:
        text = with_site_links(path)
        if path == CHECKOUT / "README.md":
            text += toctree(["start", "guides", "migration", "reference/index", "internals"])
        elif path.name == "README.md":
            text += toctree(pages_in_tables(text))
        elif path == DOCS / "benchmarking.md":
            text += toctree([f"benchmarks/{file.stem}" for file in sorted(DOCS.glob("benchmarks/*.json"))])
        if path != DOCS / "README.md":
            yield site_name(path), text
    for file in DOCS.glob("benchmarks/*.json"):
        yield f"benchmarks/{file.stem}.md", details(json.loads(file.read_text()))
    tables = {file.stem: json.loads(file.read_text()) for file in sorted(FIGURES.glob("*.json"))}
    yield "decisions/figures.md", decision_figures(tables)


def section_pages() -> Iterator[tuple[str, str]]:
    """Yields a page for each section of docs/README.md, above the pages that its table lists."""
    for section in with_site_links(DOCS / "README.md").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        children = [page for page in pages_in_tables(text) if page not in ("/start", "/reference/index")]
        yield f"{title.lower()}.md", f"# {title}\n{text}{toctree(children)}"


def with_site_links(path: Path) -> str:
    """Returns the text of a page whose links lead to pages of the site. Links to other files become text."""

    def link(found: re.Match[str]) -> str:
        text, target, heading = found.groups()
        if not target or "://" in target:
            return found[0]
        file = (path.parent / target).resolve()
        if file.is_relative_to(DOCS / "images"):
            return f"[{text}](/images/{file.name})"
        if file == DOCS / "README.md" and heading:
            return f"[{text}](/{heading[1:]}.md)"
        if file == FIGURES or file.parent == FIGURES:
            return f"[{text}](/decisions/figures.md{f'#{file.stem}' if file.suffix else ''})"
        is_page = file.suffix == ".md" and (file.is_relative_to(DOCS) or file in map(CHECKOUT.joinpath, ROOT_PAGES))
        return f"[{text}](/{site_name(file)}{heading})" if is_page else text

    text = re.sub(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*|)\)", link, path.read_text())
    return re.sub(r"^```rust,\w+$", "```rust", text, flags=re.MULTILINE)


def site_name(path: Path) -> str:
    special = {CHECKOUT / "README.md": "index.md", DOCS / "README.md": "guides.md"}
    return special.get(path) or str(path.relative_to(DOCS if path.is_relative_to(DOCS) else CHECKOUT))


def pages_in_tables(text: str) -> list[str]:
    """Returns the pages to which the first column of each table links."""
    return [name.removesuffix(".md") for name in re.findall(r"^\| \[[^\]]*\]\((/[^)#]*)", text, re.MULTILINE)]


def toctree(pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yields a page for each public module, for the operators, and for the header."""
    paths = [*PACKAGE.glob("[a-z]*.py"), PACKAGE / "dcp", *PACKAGE.glob("compat/[a-z]*/")]
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in sorted(paths)]
    rows = []
    for name in ("fst", *modules):
        module = importlib.import_module(name)
        summary = (inspect.getdoc(module) or "").partition(".\n")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| [{name}](/reference/{name}.md) | {summary} |")
        yield f"reference/{name}.md", "\n".join(module_page(name, vars(module)))
    schemas = [str(each) for each in torch._C._jit_get_all_schemas() if re.match(r"fst::[a-z]", each.name)]
    yield "reference/operators.md", "\n".join([OPERATORS, "```text", *sorted(schemas), "```", ""])
    yield "reference/cpp.md", header_page((PACKAGE / "include" / "fst" / "fst.h").read_text())
    rows.append("| [Operators](/reference/operators.md) | Schemas of `torch.ops.fst` |")
    rows.append("| [C++](/reference/cpp.md) | Functions and types of `fst/fst.h` |")
    table = "\n".join(["# Reference", "", "| page | subject |", "|---|---|", *rows, ""])
    yield "reference/index.md", table + toctree(pages_in_tables(table))


def module_page(module: str, values: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a page with a table of the public names and the documentation of each."""
    names = [name for name in values["__all__"] if inspect.isroutine(values[name]) or inspect.isclass(values[name])]
    yield from [f"# {module}", "", "```{eval-rst}", f".. automodule:: {module}", "   :no-members:", ""]
    yield from [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names), ""]
    for name in names:
        value = values[name]
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        kind = "exception" if is_error else "class" if inspect.isclass(value) else "function"
        # Classes that a module only exports again have their entry in the index where they are documented first.
        index = "" if value not in DOCUMENTED else "   :no-index:"
        DOCUMENTED.append(value)
        yield from [f".. auto{kind}:: {module}.{name}", *([] if kind == "function" else ["   :members:"]), index, ""]
    yield "```\n"


if __name__ == "__main__":
    main()
