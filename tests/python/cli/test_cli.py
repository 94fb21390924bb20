"""The command `fst`: output, files and exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fst
from saved import flip_bit
from suite import CHECKOUT

WEIGHTS = {
    "layers.0.weight": torch.randn(4, 3),
    "layers.1.weight": torch.randn(2, 3, dtype=torch.bfloat16),
    "step": torch.tensor(7),
}


@pytest.fixture
def shell(python_environ: dict[str, str], tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a line of Bash with the command `fst` in the directory of the test."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = f'fst() {{ "{sys.executable}" -m fst_command "$@"; }}; {line}'
        return subprocess.run(
            ["bash", "-c", command], env=python_environ, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def sharded(tmp_path):
    """The same tensors in two files with an index."""
    (tmp_path / "sharded").mkdir()
    fst.save_file(WEIGHTS, tmp_path / "sharded" / "model.safetensors", max_shard_bytes=56)
    return tmp_path / "sharded" / "model.safetensors.index.json"


def test_inspect_text(command, model):
    done = command("inspect", model)
    assert done.returncode == 0
    assert re.search(r"^layers\.0\.weight\s+F32\s+\[4, 3\]\s+48 B$", done.stdout, re.MULTILINE)
    assert re.search(r"^step\s+I64\s+\[\]\s+8 B$", done.stdout, re.MULTILINE)
    assert "3 tensors in 1 file, 68 B: 12 F32, 6 BF16, 1 I64 parameters" in done.stdout
    assert "format = pt" in done.stdout


def test_inspect_json(command, sharded):
    shown = json.loads(command("inspect", sharded.parent, "--json").stdout)
    assert shown["total"] == {"tensors": 3, "parameters": 19, "bytes": 68}
    first = shown["tensors"][0]
    assert (first["name"], first["dtype"], first["shape"], first["bytes"]) == ("layers.0.weight", "F32", [4, 3], 48)
    assert first["path"].endswith("model-00001-of-00002.safetensors")
    assert len(shown["files"]) == 2


def test_inspect_goes_on_after_a_bad_file(command, sharded):
    bad, *others = sorted(sharded.parent.glob("*.safetensors"))
    bad.write_bytes(b"no header")
    done = command("inspect", sharded.parent, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["total"]["tensors"] == len(fst.load_files(others))
    assert done.stderr.startswith(f"fst: {bad}")
    assert command("inspect", bad).stdout == ""


# Clears the screen, goes to the start of the line, reverses the text, starts another line, sets the window's title.
HIDDEN = "\x1b[2J\ra\u202eb\u2066c\nok\x07\x9bd"
# Characters of it that no command prints. Progress bars print carriage returns.
ACTING = set("\x1b\u202e\u2066\x07\x9b")


def test_hidden_characters_reach_no_terminal(command, tmp_path):
    """Names, metadata and paths are shown with escapes in the output of every command."""
    inner = tmp_path / HIDDEN
    inner.mkdir()
    path = inner / f"{HIDDEN}.safetensors"
    tensors = {f"é{HIDDEN}{number}": torch.tensor([1.0, float("nan")]) for number in range(2)}
    save_file(tensors, path, metadata={HIDDEN: HIDDEN})
    (inner / f"{HIDDEN}.index").mkdir()
    index = inner / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {HIDDEN: path.name}}))
    save_file(tensors, inner / "other.safetensors")
    torch.save({HIDDEN: [1]}, inner / f"{HIDDEN}.pt")
    (inner / "empty.pt").touch()
    for arguments in (
        ["inspect", path],
        ["inspect", index],
        ["inspect", inner / "absent"],
        ["verify", path, index, inner, inner / "absent", "--finite"],
        ["time", path],
        ["time", path, "--names", HIDDEN],
        ["time", inner / "absent"],
        ["inspect", path, "--tree"],
        ["doctor", path, inner / "absent"],
        ["convert", path, inner / "new.safetensors"],
        ["convert", path, inner / "other.safetensors", inner / "new.safetensors"],
        ["convert", path, inner / "other.safetensors", inner / "newer.safetensors"],
        ["convert", inner / f"{HIDDEN}.pt", inner / "newer.safetensors"],
        ["convert", inner / f"{HIDDEN}.pt", inner / "newer.safetensors", "--key", "a"],
        ["convert", inner / "empty.pt", inner / "newer.safetensors"],
        ["convert", path, inner / HIDDEN],
        ["inspect", path, f"--{HIDDEN}"],
        ["time", path, "--dtype", HIDDEN],
    ):
        done = command(*arguments)
        printed = done.stdout + done.stderr
        assert not set(printed) & ACTING, (arguments, printed)
        assert not re.search(r"^ok\\", printed, re.MULTILINE), (arguments, printed)
        assert r"\x1b[2J" in printed or r"\u{1b}[2J" in printed or "on cpu" in printed or "(all)" in printed, (
            arguments,
            printed,
        )
    with pytest.raises(KeyError), fst.profile() as recorded:
        fst.load_tensors(path, [HIDDEN])
    assert not set(str(recorded.summary())) & ACTING
    shown = json.loads(command("inspect", path, "--json").stdout)
    assert [tensor["name"] for tensor in shown["tensors"]] == sorted(tensors)
    assert shown["files"] == [{"path": str(path), "metadata": {HIDDEN: HIDDEN}}]


def test_verify_valid_and_cut_files(command, model, sharded):
    done = command("verify", model, sharded, sharded.parent)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("all is well\n")
    assert f"ok      bytes of {model}: {model.stat().st_size:,} bytes read" in done.stdout
    wrong = sharded.parent / "model-00002-of-00002.safetensors"
    os.truncate(wrong, wrong.stat().st_size - 1)
    done = command("verify", sharded, "--finite")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    # One verdict for a file.
    assert [line for line in lines if wrong.name in line] == [line for line in lines if line.startswith("WRONG")]
    assert "ok      header of " + str(sharded.parent / "model-00001-of-00002.safetensors") in done.stdout
    assert lines[-1] == "1 check failed"


def test_verify_index(command, sharded):
    index = json.loads(sharded.read_text())
    index["weight_map"]["layers.9.weight"] = "model-00001-of-00002.safetensors"
    sharded.write_text(json.dumps(index))
    done = command("verify", sharded)
    assert done.returncode == 1
    assert f"WRONG   names of {sharded}" in done.stdout
    assert "layers.9.weight" in done.stdout


def test_verify_finite(command, tmp_path):
    small = torch.tensor([float("inf")]).to(torch.float8_e5m2)
    values = {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")]), "small": small}
    save_file(values, tmp_path / "values.safetensors")
    assert command("verify", "values.safetensors").returncode == 0
    done = command("verify", "values.safetensors", "--finite")
    assert done.returncode == 1
    assert re.search("NaN or infinity in 2 tensors: (bad, small|small, bad)", done.stdout)


def test_load_summary(command, model, tmp_path):
    done = command("time", model, "--dtype", "float16", "--repeat", "2", "--trace", "load.json")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^3 tensors, 44 B on cpu in \d+\.\d\d m?s: \d+\.\d\d GB/s$", done.stdout, re.MULTILINE)) == 2
    assert "1 load, 3 tensors" in done.stdout
    assert json.loads((tmp_path / "load.json").read_text())
    assert "1 tensor, 8 B on cpu" in command("time", model, "--names", "step").stdout


@pytest.mark.gpu
def test_load_to_gpu(command, model):
    assert "3 tensors, 68 B on cuda in " in command("time", model, "--device", "cuda").stdout


@pytest.mark.parametrize("legacy", [False, True])
def test_convert_from_pytorch(command, tmp_path, legacy):
    tied = torch.randn(3, 2)
    state = {"a": tied, "b": tied, "turned": torch.randn(2, 5).t(), "inner": {"c": torch.arange(4)}}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "m.ckpt", _use_new_zipfile_serialization=not legacy)
    refused = command("convert", "m.ckpt", "m.safetensors")
    assert refused.returncode == 1
    assert "epoch is of type int" in refused.stderr
    assert "probably --key state_dict" in refused.stderr
    assert not (tmp_path / "m.safetensors").exists()
    done = command("convert", "m.ckpt", "m.safetensors", "--key", "state_dict")
    assert done.returncode == 0, done.stderr
    expected = {"a": tied, "b": tied, "turned": state["turned"].contiguous(), "inner.c": torch.arange(4)}
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors"), expected, rtol=0, atol=0)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


class Bomb:
    """Makes a directory when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


OPTIMIZER = {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1}]}
TRAINING = {"scaler": {"scale": torch.ones(1)}, "the model": {"a": torch.ones(9)}, "optim": OPTIMIZER, "epoch": 3}
# Files that torch.save writes, options, and names of the tensors or a part of the error.
FROM_PYTORCH = [
    ({"a": Bomb()}, [], "x.pt: .*mkdir"),
    (
        torch.nn.Linear(2, 2),
        [],
        r"x.pt: the file holds code \(torch.nn.modules.linear.Linear\), which does not run here; convert a state dict: "
        r"torch.save\(model.state_dict\(\), ...\)\n$",
    ),
    (TRAINING, [], r"probably --key 'the model' \(36 B\)"),
    ({"w": torch.ones(3), "step": 5}, [], r"x.pt: step is of type int, .* with --tensors-only"),
    ({"w": torch.ones(3), "step": 5, "inner": {"lr": 0.1}}, ["--tensors-only"], ["w"]),
    ({"sd": {"w": torch.ones(3)}, "loss": np.float64(3), "all": np.ones(2)}, ["--key", "sd"], ["w"]),
    ({"w": torch.ones(3).to_sparse()}, [], r"x.pt: tensor 'w' is sparse; .*to_dense"),
    ({"a.b": torch.ones(3), "a": {"b": torch.ones(2)}}, [], r"x.pt: two tensors have the name 'a.b'"),
    (torch.jit.script(torch.nn.Linear(2, 2)), [], r"x.pt: this is a TorchScript archive; .*torch.jit.load"),
    ({"w": np.ones(2)}, [], r"x.pt: .*this is a NumPy archive.*numpy.load"),
]


def save_content(content):
    if isinstance(content, torch.jit.ScriptModule):
        torch.jit.save(content, "x.pt")
    elif isinstance(content, dict) and isinstance(next(iter(content.values())), np.ndarray):
        with open("x.pt", "wb") as file:
            np.savez(file, **content)
    else:
        torch.save(content, "x.pt")


def test_convert_what_torch_saves(command, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, options, expected in FROM_PYTORCH:
        save_content(content)
        done = command("convert", "--force", "x.pt", "x.safetensors", *options)
        if isinstance(expected, list):
            assert sorted(load_file("x.safetensors")) == expected
        else:
            assert done.returncode == 1
            assert re.search(expected, done.stderr, re.DOTALL), done
            assert "weights_only=False" not in done.stderr
    assert not (tmp_path / "ran").exists()
    torch.save({"step": torch.tensor(8)}, "x.pt")
    assert "x.pt: 'step' is in an earlier file, too" in command("convert", model, "x.pt", "new.safetensors").stderr


def test_convert_merges_and_shards(command, sharded, tmp_path):
    assert command("convert", sharded, "one.safetensors").returncode == 0
    torch.testing.assert_close(load_file(tmp_path / "one.safetensors"), WEIGHTS, rtol=0, atol=0)
    convert = ("convert", "one.safetensors", "parts/model.safetensors", "--max-shard-size", "56B")
    assert command(*convert).returncode == 1
    (tmp_path / "parts").mkdir()
    done = command(*convert)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 2
    torch.testing.assert_close(fst.load_file(tmp_path / "parts"), WEIGHTS, rtol=0, atol=0)


def test_convert_pytorch_shards(command, tmp_path):
    """A directory, an index, and a pattern that no shell has replaced. The directory has files of the training, too."""
    directory = tmp_path / "bins"
    directory.mkdir()
    files = {name: f"pytorch_model-{number:05}-of-00003.bin" for number, name in enumerate(WEIGHTS, 1)}
    for name, file in files.items():
        torch.save({name: WEIGHTS[name]}, directory / file)
    torch.save(OPTIMIZER, directory / "optimizer.pt")
    for given in ("bins", "bins/*_model-*.bin", "bins/pytorch_model.bin.index.json", "bins"):
        done = command("convert", given, "m.safetensors", "--force")
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(load_file(tmp_path / "m.safetensors"), WEIGHTS, rtol=0, atol=0)
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    (directory / files["step"]).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "this is a Git LFS pointer" in command("convert", "bins", "m.safetensors", "--force").stderr
    for weight_map, message in (
        ({"more": next(iter(files.values()))}, "no file of the index has 'more'"),
        (files | {"step": "../step.bin"}, "is not in the directory of the index"),
        (["step"], 'expected an index, a JSON object with an object "weight_map"'),
    ):
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        done = command("convert", "bins", "m.safetensors", "--force")
        assert done.returncode == 1
        assert message in done.stderr


def test_convert_overwrites_by_request_only(command, model, sharded, tmp_path):
    content = model.read_bytes()
    for target in (model, sharded.with_name("model.safetensors")):
        done = command("convert", sharded, target)
        assert done.returncode == 1
        assert "exists; give another target, or overwrite it with --force" in done.stderr
    assert model.read_bytes() == content
    assert command("convert", sharded, model, "--force", "--dtype", "float16").returncode == 0
    assert load_file(model)["layers.0.weight"].dtype is torch.float16
    # Without the older index, the directory is the new checkpoint.
    assert command("convert", model, sharded.with_name("model.safetensors"), "--force").returncode == 0
    assert fst.load_file(sharded.parent)["layers.0.weight"].dtype is torch.float16
    assert not sharded.exists()


def test_convert_says_which_metadata_differ(command, tmp_path):
    for name, step in (("a", "1"), ("b", "2")):
        metadata = {"format": "pt", "step": step}
        fst.save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors", metadata=metadata, digests="blake3")
    done = command("convert", "a.safetensors", "b.safetensors", "merged.safetensors")
    assert done.returncode == 0
    assert re.findall("metadata '(.*?)'", done.stderr) == ["step"]
    assert fst.metadata(tmp_path / "merged.safetensors")["step"] == "2"


def test_home_directory_in_options(command, model, tmp_path, monkeypatch):
    """Shells do not replace a tilde behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("time", "~/model.safetensors", "--trace=~/load.json").returncode == 0
    assert (tmp_path / "load.json").exists()


def test_completion(command, shell):
    """Bash completes subcommands, options, their values, and paths where no option has been begun."""
    script = command("completion", "bash").stdout
    complete = 'complete() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fst fst "${@: -1}"; echo "${COMPREPLY[@]}"; };'
    lines = (
        "fst ins; complete fst key n; complete fst time --tr; complete fst convert a --digests b; complete fst time '';"
        " complete fst convert a --dtype bf; complete fst time a --device cu"
    )
    assert shell(f"{script}\n{complete} complete {lines}").stdout.split("\n") == [
        "inspect",
        "new",
        "--trace",
        "blake3",
        "",
        "bfloat16",
        "cuda",
        "",
    ]
    assert {"zsh", "fish"} <= {*re.findall(r"\w+", command("completion", "--help").stdout)}


def test_completion_of_names(command, shell, tmp_path):
    """Names come from the header. A name that a shell would run is none of them."""
    weights = {name: torch.ones(2) for name in ("layers.0.weight", "layers.1.weight", "head", "$(touch ran)", "`id`")}
    save_file(weights, tmp_path / "named.safetensors")
    script = command("completion", "bash").stdout
    program = f'fst() {{ {sys.executable} -m fst "$@"; }}'
    complete = 'complete() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fst fst "${@: -1}"; echo "${COMPREPLY[@]}"; };'
    lines = (
        "fst cat named.safetensors lay; complete fst inspect named.safetensors --names h;"
        " complete fst cat named.safetensors --r; complete fst cat named.safetensors ''; complete fst cat none x"
    )
    found = shell(f"{program}\n{script}\n{complete} complete {lines}").stdout.split("\n")
    assert sorted(found[0].split()) == ["layers.0.weight", "layers.1.weight"]
    assert found[1:3] == ["head", "--raw"]
    assert sorted(found[3].split()) == ["head", "layers.0.weight", "layers.1.weight"]
    assert found[4] == ""
    assert not (tmp_path / "ran").exists()
    assert command("completion", "names").returncode == command("completion", "bash", "x").returncode == 1


def test_convert_casts_by_patterns(command, model, tmp_path):
    """Patterns apply to all inputs together. A dtype without a pattern applies to the rest, in any order."""
    torch.save({"head.weight": torch.randn(3), "head.scale": torch.randn(3)}, tmp_path / "head.pt")
    arguments = ["--dtype", "float16", "--dtype", "*.scale=keep", "--dtype", "layers.0.*=bfloat16"]
    done = command("convert", model, "head.pt", "mixed.safetensors", *arguments)
    assert done.returncode == 0, done.stderr
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "mixed.safetensors").items()}
    assert (dtypes["head.weight"], dtypes["head.scale"]) == (torch.float16, torch.float32)
    assert (dtypes["layers.0.weight"], dtypes["layers.1.weight"]) == (torch.bfloat16, torch.float16)
    assert dtypes["step"] == WEIGHTS["step"].dtype
    done = command("convert", model, "other.safetensors", "--dtype", "*.wieght=float16")
    assert done.returncode == 1
    assert '"*.wieght" matches no tensor; the nearest are "layers.0.weight"' in done.stderr
    assert command("time", model, "--dtype", "*.weight=float16").returncode == 0
    assert command("time", model, "--dtype", "*.weight=int8").returncode == 2


INVALID = [
    (["inspect"], 2, "PATH"),
    (["convert", "a.safetensors", "b.safetensors", "--max-shard-size", "much"], 2, "is not a size"),
    (["convert", "a.safetensors", "b.pt"], 2, "must end in .safetensors"),
    (["convert", "a.safetensors", "b.safetensors", "--rename", "{k}.weight"], 2, "is not OLD=NEW"),
    (["convert", "a.safetensors", "b.safetensors", "--rename", "{k}=n.{l}"], 2, "is not a variable of"),
    (["convert", "a.safetensors", "b.safetensors", "--metadata", "format"], 2, "is not KEY=VALUE"),
    (["convert", "a.safetensors", "nowhere/b.safetensors"], 1, "there is no directory nowhere; create it"),
    (["time", "nowhere.safetensors", "--trace", "."], 1, "fst: .: is a directory; give the path of a file in it"),
    (["verify"], 2, "usage: fst verify"),
    (["verify", "--manifest", "a", "--signature", "b"], 2, "exclude each other"),
    (["verify", "--signature", "a"], 2, "--signature needs the signer: --public-key"),
    (["clean", "nothing"], 1, "nothing: cannot list: No such file or directory"),
    (["inspcet"], 2, "did you mean 'inspect'?"),
    (["inspect", "a.safetensors", "--nmaes=b"], 2, "did you mean '--names'?"),
    (["inspect", "nowhere"], 1, "fst: nowhere: "),
    (["convert", "nowhere", "b.safetensors"], 1, "nowhere"),
    (["time", "nowhere.safetensors"], 1, "fst: nowhere.safetensors: "),
    (["time", "nowhere.safetensors", "--device", "gpu"], 1, "device 'gpu' does not exist; give"),
    (["time", "nowhere.safetensors", "--repeat", "0"], 2, "'0' is not a whole number of at least 1"),
    (["inspect", "nowhere.safetensors", "--depth", "0"], 2, "'0' is not a whole number of at least 1"),
]


def test_invalid_arguments(command):
    for arguments, code, message in INVALID:
        done = command(*arguments)
        assert (done.returncode, message in done.stderr) == (code, True), (arguments, done)
        assert "Traceback" not in done.stderr


def test_shell_gets_output_and_exit_code(shell, model):
    """A closed pipe is no error, whether Python writes at once or at exit."""
    done = shell(
        "fst inspect model.safetensors --names step | true; echo codes ${PIPESTATUS[0]};"
        "PYTHONUNBUFFERED=1 fst inspect model.safetensors | true; echo ${PIPESTATUS[0]};"
        "fst inspect nowhere.safetensors"
    )
    assert (done.returncode, done.stdout) == (1, "codes 0\n0\n")
    assert re.fullmatch(r"fst: nowhere\.safetensors: .*\n", done.stderr)


def test_bench_is_a_separate_package(shell, tmp_path):
    """Its distribution names the function in an entry point."""
    package = f"PYTHONPATH={Path(fst.__file__).parents[1]}"
    for arguments, status in (("--help", 0), ("", 1)):
        missing = shell(f"{package} fst bench {arguments}")
        assert missing.returncode == status
        assert "pip install ./benches" in missing.stdout + missing.stderr
    tomllib = pytest.importorskip("tomllib")
    entries = tomllib.loads((CHECKOUT / "benches" / "pyproject.toml").read_text())["project"]["entry-points"]
    (tmp_path / "fst_bench-1.dist-info").mkdir()
    (tmp_path / "fst_bench-1.dist-info" / "entry_points.txt").write_text(
        f"[fst.commands]\nbench = {entries['fst.commands']['bench']}\n"
    )
    found = shell(f"{package}:{CHECKOUT / 'benches'}:{tmp_path} fst bench --help")
    assert (found.returncode, found.stdout[:6]) == (0, "usage:")


def test_verify_compares_digests(command, tmp_path):
    save_file(WEIGHTS, tmp_path / "plain.safetensors")
    assert command("convert", "plain.safetensors", "model.safetensors", "--digests", "blake3").returncode == 0
    done = command("verify", "model.safetensors")
    assert done.returncode == 0
    assert "ok      digests of model.safetensors: 3 tensors and the header verified" in done.stdout
    assert re.search("fst.digests = blake3:[0-9a-f]{64}$", command("inspect", "model.safetensors").stdout, re.MULTILINE)
    done = command("verify", "plain.safetensors", "--digests")
    assert done.returncode == 1
    assert "carries no digests" in done.stdout
    flip_bit(tmp_path / "model.safetensors", -1)
    done = command("verify", "model.safetensors")
    assert done.returncode == 1
    assert re.search("WRONG   digests of model.safetensors: .*the file states blake3:", done.stdout)


def test_verify_compares_a_manifest(command, shell, tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "note.txt").write_text("any file")
    subprocess.run("sha256sum model.safetensors ./note.txt > sums", shell=True, cwd=tmp_path, check=True)
    done = command("verify", "--manifest", "sums")
    assert done.returncode == 0
    assert "2 files with the digests of sums" in done.stdout
    (tmp_path / "note.txt").write_text("other fi")
    done = command("verify", "--manifest", "sums", tmp_path)
    assert done.returncode == 1
    assert re.search("WRONG .*note.txt.*the manifest states sha256:", done.stdout)
    assert "nothing to verify" in command("verify").stderr
