"""`fst convert`: names, metadata, memory, and failures in the middle."""

import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import fst
from fst._recipe.names import renaming
from fst._save import parts

NAMES = [
    "model.layers.0.up.weight",
    "model.layers.0.up.bias",
    "model.layers.11.up.weight",
    "lm_head.weight",
    "a{b}.inv",
]
TENSORS = {name: torch.full((2, 3), float(number)) for number, name in enumerate(NAMES)}

# Options, and the new names of the tensors, None for those that are dropped.
RENAMED = [
    (
        ["--rename", "model.{*rest}={*rest}"],
        ["layers.0.up.weight", "layers.0.up.bias", "layers.11.up.weight", *NAMES[3:]],
    ),
    (
        ["--rename", "model.layers.{k}.up.{*p}=up{k}.{{x}}.{*p}", "--rename", "model.{*rest}=never"],
        ["up0.{x}.weight", "up0.{x}.bias", "up11.{x}.weight", *NAMES[3:]],
    ),
    (
        ["--drop", "*.bias", "--drop", "lm_head.*", "--rename", "a{{b}}.{k}=c.{k}"],
        [NAMES[0], None, NAMES[2], None, "c.inv"],
    ),
]


def test_renames_and_drops(command, tmp_path):
    save_file(TENSORS, tmp_path / "m.safetensors", metadata={"format": "pt", "step": "1"})
    for number, (options, names) in enumerate(RENAMED):
        done = command("convert", "m.safetensors", f"{number}.safetensors", *options, "--metadata", "step=2=3")
        assert done.returncode == 0, done.stderr
        expected = {new: TENSORS[old] for old, new in zip(NAMES, names, strict=True) if new}
        torch.testing.assert_close(load_file(tmp_path / f"{number}.safetensors"), expected, rtol=0, atol=0)
        assert fst.metadata(tmp_path / f"{number}.safetensors") == {"format": "pt", "step": "2=3"}
    # Dtypes belong to the new names.
    options = ("--rename", "lm_head.{k}=head.{k}", "--dtype", "head.*=float16")
    assert command("convert", "m.safetensors", "cast.safetensors", *options).returncode == 0
    assert load_file(tmp_path / "cast.safetensors")["head.weight"].dtype is torch.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rename", "model.layers.{k}.up.{n}=up.{n}"], 'would both be "up.weight"; nothing was written'),
        (["--rename", "lm_haed.{k}=head.{k}"], "no name of a tensor matches 'lm_haed.{k}'"),
        (["--drop", "*.baes"], "no name of a tensor matches '*.baes'"),
        (["--rename", "lm_head.{k}=model.layers.0.up.{k}"], 'would both be "model.layers.0.up.weight"'),
    ],
)
def test_wrong_names_are_errors_before_a_write(command, tmp_path, options, message):
    save_file(TENSORS, tmp_path / "m.safetensors")
    done = command("convert", "m.safetensors", "new.safetensors", *options)
    assert (done.returncode, message in done.stderr) == (1, True), done
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a.{k}.{k}", "b", "occurs twice"),
        ("a.{k", "b", "a single '{' at character 3"),
        ("a.{k}", "b.{l}", r"not a variable of 'a.{k}', which has {k}"),
    ],
)
def test_wrong_patterns(old, new, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\\", "")):
        renaming(old, new)


def test_peak_memory(tmp_path, fork_python):
    """A cast of one large tensor and of many small ones takes neither of them as a whole."""
    large = {"large": torch.zeros(48 << 20), **{f"small.{number}": torch.zeros(256, 1024) for number in range(64)}}
    fst.save_file(large, tmp_path / "m.safetensors")
    program = """
import sys
import fst
from fst import cli
from procfs import peak_mib

def convert(source, target):
    try:
        cli.main(["convert", source, target, "--dtype", "float16"])
    except SystemExit as end:
        assert end.code == 0

fst.save_file({"w": fst.load_file(sys.argv[1])["small.0"].clone()}, sys.argv[2])
convert(sys.argv[2], sys.argv[2] + ".warm.safetensors")
print(peak_mib(lambda: convert(sys.argv[1], sys.argv[3])))
"""
    paths = (str(tmp_path / name) for name in ("m.safetensors", "warm.safetensors", "half.safetensors"))
    *_, peak = fork_python(program, *paths).split()
    assert int(peak) < 64
    assert load_file(tmp_path / "half.safetensors")["large"].dtype is torch.float16


def test_a_failed_read_leaves_nothing(command, tmp_path, monkeypatch):
    """A file that becomes shorter fails in the middle of a shard."""
    fst.save_file({f"{k}.w": torch.ones(2 << 20) for k in range(4)}, tmp_path / "m.safetensors")
    (tmp_path / "out").mkdir()

    class Cutting(parts.FileSave):
        def append(self, tensors):
            os.truncate(tmp_path / "m.safetensors", 5 << 20)
            self._object.append(tensors)

    monkeypatch.setattr(parts, "FileSave", Cutting)
    done = command(
        "convert", "m.safetensors", "out/model.safetensors", "--max-shard-size", "9MiB", "--dtype", "float16"
    )
    assert done.returncode == 1
    assert "m.safetensors" in done.stderr
    assert os.listdir(tmp_path / "out") == []


RULES = """
# Experts of all layers.
model.{k}.up = stack(0, e, layers.{k}.experts.{e}.up.weight) : f16

else kept.{*n} = {*n}
"""


def test_recipes(command, tmp_path):
    experts = {f"layers.{k}.experts.{e}.up.weight": torch.randn(4, 6) for k in range(2) for e in range(3)}
    save_file(experts | {"a": torch.ones(2)}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    (tmp_path / "rules").write_text(RULES)
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "wrong").write_text("x = cat(0)")
    torch.save(experts, tmp_path / "x.pt")
    options = ("--recipe", "rules", "--rename", "kept.{*n}={*n}", "--digests", "blake3")
    done = command("convert", "1.safetensors", "2.safetensors", "new.safetensors", *options)
    assert done.returncode == 0, done.stderr
    stacked = {
        f"model.{k}.up": torch.stack([experts[f"layers.{k}.experts.{e}.up.weight"] for e in range(3)]).half()
        for k in range(2)
    }
    expected = stacked | {"a": torch.ones(2), "b": torch.zeros(3)}
    torch.testing.assert_close(load_file(tmp_path / "new.safetensors"), expected, rtol=0, atol=0)
    assert fst.metadata(tmp_path / "new.safetensors")["format"] == "pt"
    fst.verify(tmp_path / "new.safetensors")
    for source, arguments, message in (
        ("1.safetensors", ["--recipe", "empty"], "empty: has no rules"),
        ("1.safetensors", ["--recipe", "wrong"], "column 5: cat needs a tensor"),
        ("2.safetensors", ["--recipe", "rules"], "rule 1, column"),
        ("x.pt", ["--recipe", "rules"], "is a PyTorch file"),
        ("1.safetensors", ["--dequantize"], "no tensor is quantized"),
        ("1.safetensors", ["--dequantize", "--recipe", "rules"], "exclude each other"),
    ):
        done = command("convert", source, "none.safetensors", *arguments)
        assert (done.returncode != 0, message in done.stderr) == (True, True), done
        assert not (tmp_path / "none.safetensors").exists()


def test_dequantization(command, tmp_path):
    """Parts of a tensor begin within blocks."""
    weight = torch.randint(0, 126, (3000, 2000), dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file({"w.weight": weight, "w.weight_scale_inv": torch.rand(24, 16)}, tmp_path / "fp8.safetensors")
    done = command("convert", "fp8.safetensors", "plain.safetensors", "--dequantize", "--json")
    assert done.returncode == 0, done.stderr
    expected = fst.load_file(tmp_path / "fp8.safetensors", dequantize=True)
    torch.testing.assert_close(load_file(tmp_path / "plain.safetensors"), expected, rtol=0, atol=0)
