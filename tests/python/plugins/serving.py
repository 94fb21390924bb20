"""Helpers for the plugin tests: imports of stubs, small models and runs of engines."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save, save_file

import fst
from fst_bench.http_server import Server
from rawfile import assert_all_same
from suite import CHECKOUT

STUBS = str(Path(__file__).parent / "stubs")


def _imported(*packages: str) -> list[str]:
    return [name for name in sys.modules if any(f"{name}.".startswith(f"{package}.") for package in packages)]


@contextmanager
def imports_anew(package: str, *, stub: bool) -> Iterator[None]:
    """Imports fst's plugins anew within the block, and with `stub` the package from `stubs`."""
    fresh = ("fst.plugins", package) if stub else ("fst.plugins",)
    before = {name: sys.modules.pop(name) for name in _imported(*fresh)}
    path = list(sys.path)
    if stub:
        sys.path.insert(0, STUBS)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in _imported(*fresh):
            del sys.modules[name]
        sys.modules.update(before)


def check_entry_point(group: str, register: Callable[[], None]) -> None:
    """Checks the entry point in `pyproject.toml`. Requires Python 3.11."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"][group].items()
    assert name == "fst"
    assert EntryPoint(name, value, group).load() is register


def save_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Saves tensors of three dtypes to two files and returns them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"model.layers.{index}.weight": torch.randn(30, 7, generator=generator).bfloat16() for index in range(8)}
    tensors["model.norm.weight"] = torch.randn(7, generator=generator)
    tensors["model.steps"] = torch.arange(5)
    save_file(dict(list(tensors.items())[:5]), directory / "model-00001-of-00002.safetensors")
    save_file(dict(list(tensors.items())[5:]), directory / "model-00002-of-00002.safetensors")
    return tensors


def save_model(directory: Path, seed: int = 0) -> Path:
    """Saves a small Llama with random weights to several files."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory, max_shard_size="200KB")
    return directory


def run_engine(
    group: str, program: str, *arguments: os.PathLike[str] | str, environ: dict[str, str]
) -> tuple[list[str], str]:
    """Runs a program that starts an engine, whose processes find fst through an entry point of the group.

    Returns the lines with generated tokens, and the whole output.
    """
    if "fst" not in importlib.metadata.entry_points(group=group).names:
        pytest.skip("fst is not installed, so its entry points are not found")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        done = subprocess.run(
            [sys.executable, file.name, *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith("generated")], done.stdout


def weights(loader: Any, source: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors that the loader of an engine reads for a source."""
    return dict(loader._get_weights_iterator(source))


def check_weights(engine: Any, directory: Path) -> None:
    """Checks the tensors of files, with and without a prefix, and of the option `uri`."""
    tensors = save_checkpoint(directory)
    with fst.profile() as profile:
        found = weights(engine.loader(), engine.source(directory))
    assert profile.summary().tensors == len(tensors)
    assert list(found) == fst.tensor_names(sorted(directory.glob("*.safetensors")))
    assert_all_same(found, tensors)
    drafts = {f"draft.{name}": tensor for name, tensor in tensors.items()}
    assert_all_same(weights(engine.loader(), engine.source(directory, "draft.")), drafts)
    # The model has no weights at its path then; weights of other paths have a prefix.
    (directory / "empty").mkdir()
    with Server() as server:
        server.put("m.safetensors", save(tensors))
        loader = engine.loader(model_loader_extra_config={"uri": server.url("m.safetensors")})
        assert_all_same(weights(loader, engine.source(directory / "empty")), tensors)
    assert_all_same(weights(loader, engine.source(directory, "draft.")), drafts)
    with pytest.raises(ValueError, match="uri must be a URL") as error:
        engine.loader(model_loader_extra_config={"uri": "secret/path"})
    assert "secret" not in str(error.value)


# Options of an engine whose ranks load as a group.
TOGETHER = {"ranks": "together", "window_bytes": 100}


def group_of_ranks(world_size: int) -> SimpleNamespace:
    """Returns a group of the processes of a test, as engines describe one."""
    return SimpleNamespace(world_size=world_size, cpu_group=dist.group.WORLD, device_group=None)


def check_gpu(engine: Any, directory: Path) -> None:
    """Checks that weights are loaded to the GPU, and with the option `device` to the CPU."""
    tensors = save_checkpoint(directory)
    found = weights(engine.loader(), engine.source(directory))
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert_all_same({name: tensor.cpu() for name, tensor in found.items()}, tensors)
    loader = engine.loader(model_loader_extra_config={"device": "cpu"})
    assert_all_same(weights(loader, engine.source(directory)), tensors)
