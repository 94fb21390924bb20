"""Releases of PyTorch that one wheel serves, and the processor that it is for."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# `major.minor`, the oldest first.
RELEASES = (CHECKOUT / "release" / "torch.txt").read_text().split()
# Platform of cargo to build for, such as aarch64-unknown-linux-gnu, or "" for this machine.
TARGET = os.environ.get("CARGO_BUILD_TARGET", "")
# Processor in the names of wheels and compilers, or "" for this machine.
PROCESSOR = TARGET.partition("-")[0]
