"""The pages of docs/api, which docs/api.py writes from the sources."""

import re
import runpy

import torch

from suite import CHECKOUT

API = runpy.run_path(str(CHECKOUT / "docs" / "api.py"), run_name="api")
PAGES = API["pages"]()


def test_pages_are_up_to_date():
    written = {path.name: path.read_text() for path in (CHECKOUT / "docs" / "api").iterdir()}
    assert written == PAGES, "run `make docs`"


def test_every_public_module_has_a_page():
    package = CHECKOUT / "torch_ext" / "fst"
    paths = [*package.glob("[a-z]*.py"), package / "dcp", *package.glob("compat/[a-z]*/")]
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts) for path in paths}
    assert set(API["MODULES"]) == modules | {"fst"}


def test_every_function_and_class_has_a_docstring():
    without = r"^\| \[`(\w+)`\]\([^)]*\) \|  \|$"
    assert [name for module in API["MODULES"] for name in re.findall(without, PAGES[f"{module}.md"], re.M)] == []


def test_operators_are_those_of_the_library():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fst::")}
    listed = re.findall(r"^(fst::\w+)\(", PAGES["operators.md"], re.MULTILINE)
    assert set(listed) == {name for name in names if not name.startswith("fst::_")}
