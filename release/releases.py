"""Releases of PyTorch that one wheel serves."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# `major.minor`, the oldest first.
RELEASES = (CHECKOUT / "release" / "torch.txt").read_text().split()
