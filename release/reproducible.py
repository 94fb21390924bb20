"""Flags of the compilers with which builds of one commit are equal: eval "$(python3 release/reproducible.py)"

They keep the directories of the checkout and of cargo out of the libraries.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from releases import CHECKOUT


def flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for the compilers of Rust, C and C++: flags that are set, and those that hide directories."""
    cargo_home = Path(environ.get("CARGO_HOME") or Path.home() / ".cargo")
    directories = {cargo_home / "registry" / "src": "crates", CHECKOUT: "fst"}

    def joined(variable: str, option: str) -> str:
        given = environ.get(variable, "").split()
        options = [f"{option}={path}={name}" for path, name in directories.items()]
        return " ".join([*given, *(option for option in options if option not in given)])

    return {
        "RUSTFLAGS": joined("RUSTFLAGS", "--remap-path-prefix"),
        "CFLAGS": joined("CFLAGS", "-ffile-prefix-map"),
        "CXXFLAGS": joined("CXXFLAGS", "-ffile-prefix-map"),
    }


if __name__ == "__main__":
    for variable, value in flags(os.environ).items():
        print(f"export {variable}={shlex.quote(value)}")
