"""Takes the version from fst's manifest. Everything else is in pyproject.toml.

fst itself is no dependency here: it must be built for the installed PyTorch first.
"""

import re
from pathlib import Path

from setuptools import setup

manifest = Path(__file__).resolve().parents[1] / "Cargo.toml"
setup(version=re.search(r'^version = "(.+)"$', manifest.read_text(), re.MULTILINE).group(1))
