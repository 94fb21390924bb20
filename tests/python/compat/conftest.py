"""Fixtures for the tests of `fst.compat`."""

import pytest
import torch
import torch.distributed as dist

import fst


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    """Runs each test in an empty directory, in which the examples name files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nccl(tmp_path):
    """An NCCL group of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def streams(monkeypatch):
    """Records opened streams with the sizes of their windows."""
    opened = []

    def stream(*arguments, open_stream=fst.stream, **options):
        opened.append((open_stream(*arguments, **options), options["window_bytes"]))
        return opened[-1][0]

    monkeypatch.setattr(fst, "stream", stream)
    return opened
