"""Settings of Sphinx for the site that build_site.py builds."""

import re
from typing import Any

from sphinx.application import Sphinx

import fst

project = "fst"
author = "The fst authors"
version = release = fst.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "pydata_sphinx_theme"
html_title = "fst"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["site"]
html_css_files = ["site.css"]

myst_heading_anchors = 4

# Names such as SafetensorError, which several modules export, lead to one of them.
suppress_warnings = ["ref.python"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autoclass_content = "both"
autosummary_generate = False
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

ENTRY = re.compile(r"    \*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: ")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
NAME = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PUBLIC = {*fst.__all__} - {"metadata", "verify"}


def to_restructured_text(*arguments: Any) -> None:
    """Converts the Markdown of a docstring in place: code, links, blocks, tables, and entries without names."""
    lines: list[str] = arguments[-1]
    section, after_blank = "", True
    result: list[str] = []
    for line in lines:
        if re.fullmatch(r"[A-Z]\w+:", line):
            section = line
        elif line and not line.startswith((" ", "|")):
            section = ""
        if section == "Raises:" and line.startswith("    ") and line[4] != " " and not ENTRY.match(line):
            # An entry such as "And the errors of `load_file`." is a paragraph after the section.
            result += [] if result and result[-1].startswith("And") else [""]
            line = line[4:]
        elif not section and after_blank and line.startswith("    "):
            result += [".. code-block:: python", ""]
            section = "code"
        elif after_blank and line.startswith("| "):
            result += [".. list-table::", "   :header-rows: 1", ""]
            section = "table"
        if line.startswith("|---"):
            continue
        after_blank = not line
        is_code = section in ("code", "Example:")
        text = line if is_code else NAME.sub(code_or_link, PAGE.sub(r":doc:`/\1`", line))
        result += table_row(text) if section == "table" and line else [text]
    lines[:] = result


def table_row(line: str) -> list[str]:
    first, *others = line.strip("| ").split(" | ")
    return [f"   * - {first}", *(f"     - {cell}" for cell in others)]


def code_or_link(found: re.Match[str]) -> str:
    text = found[1]
    if found.string[: found.start()].endswith(":doc:"):
        return found[0]
    name = text.removeprefix("fst.")
    return f":py:obj:`~fst.{name}`" if name in PUBLIC else f"``{text}``"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", to_restructured_text, priority=100)
