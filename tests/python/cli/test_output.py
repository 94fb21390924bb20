"""The command `fst` for people and programs: tables, selections of names, verdicts, hints and JSON."""

import json
import os
import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from fst._core.memory import Memory

LONG = f"model.{'long.' * 40}weight"
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def layers(tmp_path):
    """A file with two layers, numbered 2 and 10."""
    tensors = {f"model.layers.{number}.mlp.{part}": torch.ones(4, 2) for number in (2, 10) for part in ("up", "down")}
    save_file(tensors | {"head": torch.ones(3)}, tmp_path / "layers.safetensors")
    return tmp_path / "layers.safetensors"


@pytest.fixture
def shards(tmp_path):
    """A directory with two files, one of which has a long name of a tensor."""
    directory = tmp_path / "a directory with a long name that is not shown in each row"
    directory.mkdir()
    for file, name in zip(SHARDS, ["model.layers.0.self_attn.q_proj.weight", LONG], strict=True):
        save_file({name: torch.ones(4, 2)}, directory / file)
    return directory


@pytest.fixture
def terminal(monkeypatch):
    """Makes the output a terminal of 80 columns."""
    monkeypatch.setattr("fst.cli.table._terminal_columns", lambda: 80)


def test_lines_fit_the_terminal(command: Callable, shards, terminal):
    done = command("inspect", shards)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert max(map(len, lines)) <= 80
    assert re.match(r"model\.\S+\.\.\.\S+weight +F32 +\[4, 2\] +32 B  \S+$", lines[1])
    assert lines[1].endswith(".safetensors")
    tree = command("inspect", shards, "--tree").stdout
    assert max(map(len, tree.splitlines())) <= 80


def test_other_programs_get_complete_names(command, shards, monkeypatch):
    """Without a terminal nothing is cut, whatever a shell exports, and a long name makes only its own line longer."""
    monkeypatch.setenv("COLUMNS", "40")
    done = command("inspect", shards)
    by_length = sorted(done.stdout.splitlines(), key=len)
    assert LONG in by_length[-1]
    assert len(by_length[-2]) < 140
    assert done.stdout.count(SHARDS[0]) == 1
    assert str(shards) not in done.stdout


def test_names_stay_different_on_a_terminal(command, tmp_path, terminal):
    """Names that differ in the middle only, on a terminal that is too narrow for them."""
    names = [f"model.{'inner.' * 12}{number}.{'inner.' * 12}weight" for number in range(30)]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "similar.safetensors")
    rows = [line.split()[0] for line in command("inspect", "similar.safetensors").stdout.splitlines()[1:31]]
    assert len(set(rows)) == 30


def test_wide_characters_fit_the_terminal(command, tmp_path, terminal):
    """Characters of East Asian scripts take two columns, and combining ones none."""
    names = ["重" * 60, "e\u0301" * 60, "short"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "wide.safetensors")
    rows = command("inspect", "wide.safetensors").stdout.splitlines()[:4]
    columns = {
        sum(2 if character == "重" else 0 if character == "\u0301" else 1 for character in row.partition("F32")[0])
        for row in rows[1:]
    }
    assert columns == {rows[0].index("dtype")}
    assert any(re.match("重+\\.\\.\\.重+ ", row) for row in rows)


def test_metadata_of_shards(command, tmp_path, request):
    """What all shards have in common is shown once, and a long value is cut on a terminal only."""
    long = "value " * 50
    for file, number in zip(SHARDS, "12", strict=True):
        metadata = {"format": "pt", "shard": number, "long": long}
        save_file({number: torch.ones(1)}, tmp_path / file, metadata=metadata)
    shown = command("inspect", tmp_path).stdout.splitlines()
    assert shown.count("all files: format = pt") == 1
    assert [line for line in shown if "shard = " in line] == [
        f"{tmp_path / file}: shard = {number}" for file, number in zip(SHARDS, "12", strict=True)
    ]
    assert f"all files: long = {long}" in shown
    request.getfixturevalue("terminal")
    assert max(map(len, command("inspect", tmp_path).stdout.splitlines())) <= 80


def test_tree(command, layers):
    done = command("inspect", layers, "--tree")
    rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert rows == [
        ["module", "tensors", "parameters", "size"],
        ["(all)", "5", "35", "140 B"],
        ["model", "4", "32", "128 B"],
        ["layers", "4", "32", "128 B"],
        ["2", "2", "16", "64 B"],
        ["mlp", "2", "16", "64 B"],
        ["10", "2", "16", "64 B"],
        ["mlp", "2", "16", "64 B"],
    ]
    shown = json.loads(command("inspect", layers, "--tree", "--depth", "2", "--json").stdout)
    assert [module["name"] for module in shown["modules"]] == ["", "model", "model.layers"]
    assert shown["modules"][2] == {"name": "model.layers", "tensors": 4, "parameters": 32, "bytes": 128}
    shown = json.loads(command("inspect", layers, "--tree", "--names", "*.2.*", "--json").stdout)
    assert shown["modules"][0] == {"name": "", "tensors": 2, "parameters": 16, "bytes": 64}
    save_file({"." * 5000: torch.ones(1), "a[0]": torch.ones(2)}, layers)
    assert command("inspect", layers, "--tree").returncode == 0
    assert command("inspect", layers, "--names", "a[0]").returncode == 0


@pytest.mark.parametrize("arguments", [["inspect"], ["time"]])
def test_names_mean_the_same(command, layers, arguments):
    shown = command(*arguments, layers, "--names", "*.2.*", "--names", "head").stdout
    assert "3 tensors" in shown
    none = command(*arguments, layers, "--names", "head", "--names", "*.7.*")
    assert (none.returncode, none.stdout) == (1, "")
    assert "no name of a tensor matches '*.7.*'" in none.stderr
    assert "'head'" in none.stderr


def damage(path):
    os.truncate(path, path.stat().st_size - 1)


def test_load_reads_mapped_files(command, layers, monkeypatch):
    """The rate counts bytes in memory, also if tensors are views of a mapping that nothing else has read."""
    read = set()
    monkeypatch.setattr(Memory, "copy", lambda name, block: read.add(name))
    done = command("time", layers)
    assert len(read) == 5
    assert "GB/s" in done.stdout.splitlines()[0]
    assert "GB/s" not in command("time", layers, "--device", "meta").stdout.splitlines()[0]
    save_file({}, layers)
    done = command("time", layers)
    assert done.stdout.startswith("0 tensors, 0 B on cpu in ")
    assert "GB/s" not in done.stdout


def test_load_draws_a_bar_on_terminals_only(command, layers, monkeypatch):
    assert command("time", layers).stderr == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "B/s]" in command("time", layers).stderr


def test_json_of_every_command(command, layers, tmp_path):
    verified = json.loads(command("verify", layers, "--json").stdout)
    assert verified["ok"] is True
    assert [check["ok"] for check in verified["checks"]] == [True, True]
    loaded = json.loads(command("time", layers, "--repeat", "2", "--json").stdout)
    assert [load["bytes"] for load in loaded["loads"]] == [140, 140]
    assert loaded["device"] == "cpu"
    assert loaded["summary"]["loads"] == 1
    converted = json.loads(command("convert", layers, "new.safetensors", "--json").stdout)
    assert converted == {"path": "new.safetensors", "tensors": 5, "bytes": 140}
    damage(layers)
    done = command("verify", layers, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["checks"][0]["ok"] is False
