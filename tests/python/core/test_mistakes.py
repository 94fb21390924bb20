"""Mistakes of everyday use: each is told in one sentence, with the way out, in the same words by every entrance."""

import copy
import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import fst
import fst.cli
import fst.numpy
import fst.torch
from entrances import (
    FILE,
    WEIGHT,
    Model,
    WithBuffer,
    WithState,
    averaged,
    closed,
    command,
    devices,
    dtypes,
    freed,
    in_graph,
    layers,
    loads,
    modules,
    names,
    opened,
    operators,
    outputs,
    saves,
    sizes,
    slices,
    values,
    with_casts,
    with_operator,
    wrapped,
)

# Texts of Python and PyTorch that name neither the mistake nor the way out.
RAW = (
    r"Expected a value of type|Declaration:|aten::|pybind|INTERNAL ASSERT|not linked with|not compiled with|"
    r"NVIDIA driver|object is not|has no attribute|not supported between|Traceback|^'[^']*'$|index out of range"
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Files under relative paths, as messages show them."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("mistakes"))
    fst.save_file({"weight": WEIGHT, "bias": torch.zeros(4)}, FILE)
    Path("empty").mkdir()
    Path("m.safetensors").write_bytes(Path(FILE).read_bytes())
    torch.save({"a": WEIGHT}, "old.bin")
    np.savez("arrays.npz", a=np.ones(3))
    np.save("array.npy", np.ones(3))
    Path("model.gguf").write_bytes(b"GGUF" + bytes(99))
    Path("page").write_text("<!DOCTYPE html><html>not found</html>" * 9)
    Path("pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n")
    Path("config.json").write_text('{"a": 1}')
    Path("nothing.safetensors").touch()
    Path("short.safetensors").write_bytes(Path(FILE).read_bytes()[:-5])
    with zipfile.ZipFile("all.zip", "w") as archive:
        archive.write(FILE)
    yield
    os.chdir(before)


ABSENT = "No such file or directory"
NEED_CUDA = "is not available: PyTorch finds no CUDA device; `fst doctor` says why"
NO_DEVICE = 'does not exist; give "cpu", "cuda", "cuda:1" or "meta"'
NOT_FLOAT = "must be a floating-point dtype of 8 bits or more"
NO_MEMORY = 'tensor "a": has no memory of its own: .* pass a tensor that holds the values'
PREFIX = r'names differ by the prefix "{}.", which the {} has and the {} lacks: pass {}'

# For each mistake, the words of its message, and the calls that make it.
MISTAKES = {
    # Paths
    "misspelt file": (
        rf"modle.safetensors: .*{ABSENT}.*; check the path: its directory holds {FILE}",
        loads("modle.safetensors"),
    ),
    "missing suffix": (rf"model: .*{ABSENT}.*; check the path: its directory holds {FILE}", loads("model")),
    "home directory": (
        r"~/m: .*; `~` is not replaced by the home directory here; pass an absolute path",
        {k: v for k, v in loads("~/m").items() if " " not in k},
    ),
    "repository": (r"org/model: .*; a repository of the Hugging Face Hub is hf://org/model", loads("org/model")),
    "file of a repository": (r"is hf://org/model/model-1.safetensors", loads("org/model/model-1.safetensors")),
    "page of a repository": (r"is hf://org/model", loads("huggingface.co/org/model")),
    "URL without a slash": (r"hf:/org/model: .*; the URL is hf://org/model", loads("hf:/org/model")),
    "URL without slashes": (r"s3:bucket/key: .*; the URL is s3://bucket/key", loads("s3:bucket/key")),
    "misspelt scheme": (
        r'htps://x/y: the scheme "htps" is not built in; give .* that begins with .*https://',
        loads("htps://x/y"),
    ),
    "URL of a local file": (r"file://model.safetensors: .*; write file:///path", loads("file://model.safetensors")),
    "empty directory": (r"empty: this directory holds no \*.safetensors file; give the path of a file", loads("empty")),
    "directory for a file": (rf"{FILE} is a file, not a directory", loads(f"{FILE}/")),
    "file for a directory": (rf"{FILE} is a file, not a directory", loads(f"{FILE}/{FILE}")),
    "device file": (r"/dev/null: is a character device; expected a regular file", loads("/dev/null")),
    "Path of a URL": (
        r"hf:/...: pathlib removed a slash of this URL; pass the URL as a str",
        {
            "load_file": lambda: fst.load_file(Path("hf://org/model")),
            "save_file": lambda: fst.save_file({}, Path("hf://org/model")),
        },
    ),
    "bytes as a path": (
        r"a path must be a str or an os.PathLike, not bytes; pass os.fsdecode",
        {
            "load_file": lambda: fst.load_file(b"m"),
            "save_file": lambda: fst.save_file({}, b"m"),
            "torch": lambda: fst.torch.save_file({}, b"m"),
        },
    ),
    "open file": (
        r"a path must be .* not BufferedReader; pass the path of the file, not the open file",
        {"load_file": lambda: fst.load_file(opened()), "metadata": lambda: fst.metadata(opened())},
    ),
    "list of paths": (
        r"a path must be .* not list; load_files takes several",
        {"load_file": lambda: fst.load_file([FILE]), "metadata": lambda: fst.metadata([FILE])},
    ),
    "misspelt option": (
        r"unexpected keyword argument 'verfy'",
        {
            "load_file": lambda: fst.load_file(FILE, verfy=True),
            "load_tensors": lambda: fst.load_tensors(FILE, [], verfy=True),
            "load_into": lambda: fst.load_into(FILE, [], [], verfy=True),
            "safe_open": lambda: fst.safe_open(FILE, verfy=True),
            "load_module": lambda: fst.load_module(Model(), FILE, verfy=True),
            "prepare_update": lambda: fst.prepare_update([], FILE, verfy=True),
        },
    ),
    "no path": (
        r"no path was given; give at least one file",
        {
            "operator": lambda: operators.load_files([]),
            "load_files": lambda: fst.load_files([]),
            "stream": lambda: fst.stream([]),
        },
    ),
    # Files of other kinds
    "file of torch.save": (
        r"old.bin: byte 0: this is a PyTorch file, not safetensors; convert it with `fst convert",
        loads("old.bin"),
    ),
    "NumPy archive": (r"arrays.npz: .* NumPy archive, not safetensors; read it with numpy.load", loads("arrays.npz")),
    "NumPy array": (r"array.npy: .* NumPy array, not safetensors; read it with numpy.load", loads("array.npy")),
    "GGUF": (r"model.gguf: .* GGUF file, not safetensors; download the safetensors files", loads("model.gguf")),
    "ZIP": (r"all.zip: .* ZIP archive, not safetensors; unpack it", loads("all.zip")),
    "HTML page": (r"page: .* HTML page, not safetensors; download the file itself", loads("page")),
    "Git LFS pointer": (r"pointer: .* Git LFS pointer, not safetensors; run `git lfs pull`", loads("pointer")),
    "JSON": (r"config.json: .* JSON text, not safetensors; read it", loads("config.json")),
    "empty file": (
        r"nothing.safetensors: byte 0: the file has 0 bytes, .*; copy or download it again",
        loads("nothing.safetensors"),
    ),
    "cut file": (
        r'short.safetensors: tensor "weight": .* the file is cut off; copy or download it again',
        loads("short.safetensors"),
    ),
    # Devices
    "gpu": (f"device 'gpu' {NO_DEVICE}", devices("gpu")),
    "device with a wrong index": (f"device 'cuda:x' {NO_DEVICE}", devices("cuda:x")),
    "second CPU": (
        r'cpu:1 is not available: all processors are the device "cpu"; load to "cpu"',
        with_operator(devices("cpu:1"), "cpu:1"),
    ),
    "large index": (
        r"is not available: PyTorch counts devices from 0 to 127",
        with_operator(devices("cuda:999"), "cuda:999"),
    ),
    "negative index": (rf"device -1 {NO_DEVICE}", devices(-1)),
    "other device": (
        r'tensors can be loaded to cpu, cuda and meta devices, not to xpu; load to "cpu", and move them with Tensor.to',
        with_operator(devices("xpu"), "xpu"),
    ),
    "no CUDA": (f"cuda:7 {NEED_CUDA}", with_operator(devices("cuda:7"), "cuda:7")),
    "device of another type": (r"device must be a torch.device, str, int or None, not float", devices(1.5)),
    # Dtypes
    "unknown dtype": (
        r"dtype 'bf61' is not known; pass a torch.dtype, or a name such as",
        dtypes("bf61") | {"cast": lambda: fst.cast([WEIGHT], "bf61"), "pattern": dtypes({"*": "bf61"})["load_file"]},
    ),
    "NumPy dtype": (r"dtype must be a torch.dtype, .*; pass torch.float16", dtypes(np.dtype("float16"))),
    "NumPy dtype of a name": (
        r"'weight' to dtype\('float16'\); pass torch.float16",
        dtypes({"weight": np.dtype("float16")}),
    ),
    "integers": (NOT_FLOAT, with_casts(dtypes(torch.int8), torch.int8)),
    "truths": (NOT_FLOAT, with_casts(dtypes(torch.bool), torch.bool)),
    "complex": (NOT_FLOAT, with_casts(dtypes(torch.complex64), torch.complex64)),
    "pattern without a tensor": (
        r'dtype: "weigth" matches no tensor; the nearest are "weight"',
        {k: v for k, v in dtypes({"weigth": torch.float16}).items() if k != "module"},
    ),
    "raw bytes that end": (
        r"tensor 0: float32 of shape \[2\] needs 8 bytes from byte 0 on, but `bytes` has 4",
        {
            device: lambda device=device: fst.scatter(
                torch.empty(4, dtype=torch.uint8, device=device), [0], [torch.float32], [[2]]
            )
            for device in ("cpu", "meta")
        },
    ),
    "raw bytes of no dtype": (
        r"tensor 0: -1 is not the number of a dtype for raw bytes",
        {
            device: lambda device=device: fst.scatter(
                torch.empty(4, dtype=torch.uint8, device=device), [0], [torch.quint8], [[2]]
            )
            for device in ("cpu", "meta")
        },
    ),
    # Names
    "misspelt name": (r'model.safetensors: tensor "weigth": .*; the nearest names are "weight"', names("weigth")),
    "misspelt name of the command": (
        r"no name of a tensor matches 'weigth'; the nearest of 2 names is 'weight'",
        {"fst time": command("time", "--names", "weigth", FILE)},
    ),
    "str for names": (
        r"names must be a list or tuple of str, not str; pass \[names\]",
        {
            "tensors": lambda: fst.load_tensors(FILE, "weight"),
            "stream": lambda: fst.stream(FILE, names="weight"),
            "into": lambda: fst.load_into(FILE, "weight", [WEIGHT]),
        },
    ),
    # Order of arguments
    "path before tensors": (
        r"tensors must be a mapping of names to tensors, not str; the tensors come before the path",
        {
            "save_file": lambda: fst.save_file("o", {"a": WEIGHT}),
            "save_file_async": lambda: fst.save_file_async("o", {"a": WEIGHT}),
        },
    ),
    "path before the module": (
        r"module must be a torch.nn.Module, not str; the module comes before the paths",
        {"module": lambda: fst.load_module(FILE, Model())},
    ),
    "path before the model": (
        r"model must be a torch.nn.Module, not str; the model comes before the path",
        {
            "save_model": lambda: fst.torch.save_model("o", Model()),
            "load_model": lambda: fst.torch.load_model(FILE, Model()),
        },
    ),
    "class of a module": (
        r"module must be a torch.nn.Module, not type; create it first",
        {"module": lambda: fst.load_module(Model, FILE)},
    ),
    # Sizes
    "size without a number": (
        r"'lots' is not a size; expected a number and a unit, such as 5GB or 512MiB",
        sizes("lots") | {"fst convert": command("convert", FILE, "o.safetensors", "--max-shard-size", "lots")},
    ),
    "size as a float": (r'_bytes must be an int, a number of bytes, or a text such as "5GB", not 1.5', sizes(1.5)),
    "negative size": (r"_bytes is -1, but must be at least", sizes(-1)),
    # Values to save
    "nested dict": (
        r'tensor "a": expected a torch.Tensor, not a nested dict; pass one level of names, such as tensors\["a"\]',
        values({"a": {"b": WEIGHT}}),
    ),
    "number": (r'tensor "step": expected a torch.Tensor, not int; pass torch.as_tensor', values({"step": 3})),
    "None": (r'tensor "a": expected a torch.Tensor, not NoneType; remove it', values({"a": None})),
    "array": (r'tensor "a": expected a torch.Tensor, not ndarray; pass torch.as_tensor', values({"a": np.ones(3)})),
    "tensor as an array": (
        r'tensor "a": expected a NumPy array, not Tensor; fst.torch.save_file saves tensors',
        {"numpy": lambda: fst.numpy.save_file({"a": WEIGHT}, "o"), "bytes": lambda: fst.numpy.save({"a": WEIGHT})},
    ),
    "tensor for a dict": (
        r'tensors must be a mapping of names to tensors, not Tensor; pass {"name": tensor}',
        values(WEIGHT),
    ),
    "module for a dict": (
        r"tensors must be a mapping of names to tensors, not Model; pass Model.state_dict\(\)",
        values(Model()),
    ),
    "extra state": (
        r'tensor "_extra_state": expected a torch.Tensor, not a nested dict; .* fst.dcp.StorageWriter',
        {"save_model": lambda: fst.torch.save_model(WithState(), "o")},
    ),
    "number as a name": (r"must hold str only, not int", values({0: WEIGHT}, "torch")),
    "name of the metadata": (
        r'tensor "__metadata__": the format keeps this name for the metadata; choose another',
        {
            "save_file": values({"__metadata__": WEIGHT})["save_file"],
            **{
                k: v
                for k, v in values({"__metadata__": WEIGHT}, "operator", "torch").items()
                if k in ("operator", "torch")
            },
        },
    ),
    "metadata that is not text": (
        r"metadata must map str to str, not 'a' to 1; pass texts, such as json.dumps",
        values({"a": WEIGHT}, "torch", metadata={"a": 1}),
    ),
    "sparse tensor": (
        r'tensor "a": is not dense, but has the layout Sparse; pass that of to_dense\(\)',
        values({"a": WEIGHT.to_sparse()}, "operator"),
    ),
    "tensor on meta": (
        r'tensor "a": is on meta and has no values; load or initialize it first',
        values({"a": WEIGHT.to("meta")}, "operator"),
    ),
    "fake tensor": (NO_MEMORY, values({"a": in_graph(lambda: torch.ones(3))}, "torch")),
    "freed tensor": (NO_MEMORY, values({"a": freed()}, "operator", "torch")),
    "nested tensor": (
        r'tensor "a": a nested tensor is not supported; pass the tensors that its unbind\(\) returns',
        values({"a": torch.nested.nested_tensor([WEIGHT, WEIGHT])}, "torch", "torch bytes"),
    ),
    "shared memory": (
        r'these tensors share memory: "a", "b"\. .*Save one tensor of each group, or clones',
        values({"a": WEIGHT, "b": WEIGHT[1:]}),
    ),
    "dtype that the format lacks": (
        r'tensor "a": safetensors has no dtype for it; cast it to another',
        {
            k: v
            for k, v in values({"a": WEIGHT.to(torch.complex32)}, "operator", "torch").items()
            if k in ("save_file", "operator", "torch")
        },
    ),
    "other digests": (
        r"""digests must be "blake3", "sha256" or None, not 'md5'""",
        values({"a": WEIGHT}, digests="md5"),
    ),
    # Paths to save to
    "directory to save to": (r"empty: is a directory; expected a regular file", saves("empty")),
    "path without a name": (r"new/: has no file name; give the path of a file", saves("new/")),
    "directory that does not exist": (r"nowhere/o: cannot create: .*; create its directory first", saves("nowhere/o")),
    "home directory to save to": (
        r"~/o: cannot create: .*; `~` is not replaced by the home directory here",
        saves("~/o"),
    ),
    "web server to save to": (
        r"https://x/y: a file cannot be saved to a web server; save it to s3://",
        saves("https://x/y"),
    ),
    "Hub to save to": (
        r"hf://org/m: a file cannot be saved to the Hub; save it to a local path, and upload it",
        saves("hf://org/m"),
    ),
    "shards without a suffix": (
        r"out: the names of shards must end in .safetensors; give a path that ends in it",
        {"save_file": lambda: fst.save_file({"a": WEIGHT}, "out", max_shard_bytes="1KB")},
    ),
    # Outputs and regions
    "output of another shape": (
        r'"weight": the file holds float32 of shape \[3, 4\], but the output is float32 of shape \[4, 3\], .*nothing',
        outputs(torch.zeros(4, 3)),
    ),
    "output of another dtype": (
        r'"weight": the file holds float32 .*, but the output is float16 .*; nothing was written',
        outputs(torch.zeros(3, 4).half()),
    ),
    "output on meta": (
        r'"weight": the output is on meta, but only cpu and cuda tensors can be overwritten; nothing was written',
        outputs(torch.zeros(3, 4, device="meta")),
    ),
    "output of one element": (
        r'"weight": the output has several elements that share memory',
        outputs(torch.zeros(1).expand(3, 4)),
    ),
    "tensor for outputs": (
        r"out must be a list or tuple of Tensor, not Tensor; pass \[out\]",
        {"into": lambda: fst.load_into(FILE, ["weight"], WEIGHT)},
    ),
    "dict for outputs": (
        r"out must be a list or tuple of Tensor, not dict; pass list\(out.values\(\)\)",
        {"into": lambda: fst.load_into(FILE, ["weight"], {"weight": WEIGHT})},
    ),
    "array for an output": (
        r"out must hold Tensor only, not ndarray; torch.from_numpy shares its memory",
        {"into": lambda: fst.load_into(FILE, ["weight"], [np.zeros((3, 4))])},
    ),
    "slice out of range": (
        r'"weight": .* 5 indices from 2 with step 1 do not lie inside dimension 0, whose size is 3',
        slices([0], [2], [5]),
    ),
    "dimension out of range": (
        r'"weight": dimension 2 of a tensor with shape \[3, 4\]; it has 2 dimensions',
        slices([2], [0], [1]),
    ),
    "lists of other lengths": (
        r"1 names, but 2 dims, 1 starts and 1 lengths; give one of each for every name",
        slices([0, 0], [0], [1]),
    ),
    "region of slices": (
        r"boxes must hold \(start, length, step\) for each dimension",
        {
            "boxes": lambda: fst.load_boxes(FILE, ["weight"], [[slice(0, 1), slice(0, 1)]]),
            "pairs": lambda: fst.load_boxes(FILE, ["weight"], [[(0, 1), (0, 1)]]),
        },
    ),
    # Modules
    "compiled": (
        "all " + PREFIX.format("_orig_mod", "module", "checkpoint", "model._orig_mod"),
        modules(lambda: torch.compile(Model())),
    ),
    "wrapped": (
        "all " + PREFIX.format("module._orig_mod", "module", "checkpoint", "model.module._orig_mod"),
        modules(lambda: wrapped("module", torch.compile(Model()))),
    ),
    "averaged": ("2 " + PREFIX.format("module", "module", "checkpoint", "model.module"), modules(averaged)),
    "names of a target": (
        "all " + PREFIX.format("m", "target", "checkpoint", "the tensors under names without it"),
        {"update": lambda: fst.prepare_update(dict(wrapped("m", Model()).state_dict()), FILE)},
    ),
    "buffer on meta": (
        r'non-persistent buffers on meta, .*: "inverse"; initialize them before the load, or .* tie_weights\(\)',
        {"module": lambda: fst.load_module(WithBuffer().to("meta"), FILE)},
    ),
    "layers compiled one by one": (
        r'2 names of the module have "_orig_mod.", which torch.compile adds: load before it, or compile layers in',
        {"module": lambda: fst.load_module(layers(), "layers.safetensors")},
    ),
    # Objects of this process
    "pickled stream": (
        r"a \w+ of fst cannot be pickled or copied; pass the path, and open it again",
        {"pickle": lambda: pickle.dumps(fst.stream(FILE)), "copy": lambda: copy.deepcopy(fst.stream(FILE))},
    ),
    "closed file": (
        r"File is closed",
        {
            "tensor": lambda: closed().get_tensor("weight"),
            "keys": lambda: closed().keys(),
            "slice": lambda: closed().get_slice("weight"),
        },
    ),
}


def message_of(call):
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        call()
    assert isinstance(
        raised.value, (OSError, TypeError, ValueError, RuntimeError, LookupError, NotImplementedError, SystemExit)
    )
    text = str(raised.value).strip()
    # The code of the operator, the number of an OSError, and the name of the argument.
    return re.sub(r"^\[[\w -]+\] ", "", re.sub(r"^argument \S+: ", "", text))


def test_messages():
    """One test, which lists all faults of the table: 100 tests would take the time of their set-up."""
    faults = []
    for mistake, (words, calls) in MISTAKES.items():
        if mistake == "no CUDA" and torch.cuda.is_available():
            continue
        told = set()
        for entrance, call in calls.items():
            message = " ".join(message_of(call).split())
            found = re.search(words, message)
            told.add(found and found[0])
            if not found or re.search(RAW, message):
                faults.append(f"{mistake}, {entrance}: {message}")
        if len(told) > 1:
            faults.append(f"{mistake}: {told}")
    assert not faults, "\n".join(faults)
