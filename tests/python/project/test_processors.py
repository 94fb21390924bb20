"""Code for one kind of processor is compiled only for it, so that the core builds for x86-64 and 64-bit Arm."""

import re

import pytest

from suite import CHECKOUT

# Names that exist for one kind of processor only.
NAMES = {
    "x86_64": re.compile(r"arch::x86_64|is_x86_feature_detected!|\b_mm\d*_|\b__m\d+"),
    "aarch64": re.compile(r"arch::aarch64|is_aarch64_feature_detected!"),
}
FILES = sorted(path for folder in ("rust", "tests/rust", "benches/rust") for path in (CHECKOUT / folder).rglob("*.rs"))


def is_behind_cfg(lines, index, architecture):
    """Returns whether the item or statement in which a line is follows a `cfg` for this kind of processor."""
    cfg = f'#[cfg(target_arch = "{architecture}")]'
    indent = len(lines[index]) - len(lines[index].lstrip())
    for line in reversed(lines[: index + 1]):
        depth = len(line) - len(line.lstrip())
        if line.strip() == cfg and depth <= indent:
            return True
        # Another item or block begins here, or one ended.
        if not line.strip() or (depth <= indent and line.strip() in ("}", "};")):
            return False
    return False


@pytest.mark.parametrize("architecture", NAMES)
def test_code_for_one_processor_is_behind_cfg(architecture):
    modules = {
        name
        for path in FILES
        for name in re.findall(rf'#\[cfg\(target_arch = "{architecture}"\)\]\s+(?:pub )?mod (\w+);', path.read_text())
    }
    used, unguarded = 0, []
    for path in FILES:
        if path.stem in modules:
            used += 1
            continue
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            if NAMES[architecture].search(line):
                used += 1
                if not is_behind_cfg(lines, index, architecture):
                    unguarded.append(f"{path.relative_to(CHECKOUT)}:{index + 1}: {line.strip()}")
    assert used > 0
    assert not unguarded
