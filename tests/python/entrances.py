"""Calls of the same thing by every entrance: operators, functions, classes and the command line."""

import contextlib
import io
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fst
import fst.cli
import fst.torch

operators = torch.ops.fst
WEIGHT = torch.arange(12.0).reshape(3, 4)
FILE = "model.safetensors"


def command(*arguments):
    """Returns a call of the command line that raises its message."""

    def run():
        errors = io.StringIO()
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(errors):
            fst.cli.main(arguments)
        assert ended.value.code in (1, 2)
        raise SystemExit(
            re.sub(r"^(usage: .*?\nfst \w+: error: (argument \S+: )?|fst: )", "", errors.getvalue(), flags=re.S)
        )

    return run


def loads(path):
    """Loads of a path by all entrances. safetensors' entrances have its text for missing files in front."""
    return {
        "operator": lambda: operators.load_file(path),
        "list": lambda: operators.tensor_names([path]),
        "load_file": lambda: fst.load_file(path),
        "stream": lambda: fst.stream(path),
        "metadata": lambda: fst.metadata(path),
        "module": lambda: fst.load_module(nn.Linear(4, 3), path),
        "update": lambda: fst.prepare_update(nn.Linear(4, 3), path),
        "fst time": command("time", path),
        "fst inspect": command("inspect", path),
    }


def saves(path):
    return {
        "operator": lambda: operators.save_file([WEIGHT], ["a"], path),
        "save_file": lambda: fst.save_file({"a": WEIGHT}, path),
        "torch": lambda: fst.torch.save_file({"a": WEIGHT}, path),
        "Writer": lambda: fst.Writer(path),
    }


def devices(device):
    calls = {
        "load_file": lambda: fst.load_file(FILE, device),
        "stream": lambda: fst.stream(FILE, device),
        "tensors": lambda: fst.load_tensors(FILE, ["weight"], device),
        "module": lambda: fst.load_module(nn.Linear(4, 3), FILE, device),
        "update": lambda: fst.prepare_update(nn.Linear(4, 3), FILE, staging_device=device),
        "warm_up": lambda: fst.warm_up(device),
    }
    return calls | ({"fst time": command("time", "--device", device, FILE)} if isinstance(device, str) else {})


def with_operator(calls, device):
    return calls | {"operator": lambda: operators.load_file(FILE, device)}


def dtypes(dtype):
    return {
        "load_file": lambda: fst.load_file(FILE, dtype=dtype),
        "stream": lambda: fst.stream(FILE, dtype=dtype),
        "module": lambda: fst.load_module(nn.Linear(4, 3), FILE, dtype=dtype),
    }


def with_casts(calls, dtype):
    return {
        "load_file": calls["load_file"],
        "stream": calls["stream"],
        "operator": lambda: operators.load_file(FILE, dtype=dtype),
        "cast": lambda: fst.cast([WEIGHT], dtype),
        "cast in a graph": lambda: in_graph(lambda: fst.cast([torch.empty(2)], dtype)),
        "cast on meta": lambda: fst.cast([WEIGHT.to("meta")], dtype),
        "scatter on meta": lambda: fst.scatter(torch.empty(4, dtype=torch.uint8, device="meta"), [], [], [], dtype),
    }


def names(name):
    return {
        "operator": lambda: operators.load_tensors([FILE], [name]),
        "tensors": lambda: fst.load_tensors(FILE, [name]),
        "slices": lambda: fst.load_slices(FILE, [name], [0], [0], [1]),
        "stream": lambda: fst.stream(FILE, names=[name]),
        "into": lambda: fst.load_into(FILE, [name], [WEIGHT]),
        "safe_open": lambda: fst.safe_open(FILE).get_tensor(name),
        "get_slice": lambda: fst.safe_open(FILE).get_slice(name),
        "prefetch": lambda: fst.safe_open(FILE).prefetch({name: None}),
    }


def sizes(size):
    return {
        "window_bytes": lambda: fst.stream(FILE, window_bytes=size),
        "max_shard_bytes": lambda: fst.save_file({"a": WEIGHT}, "o.safetensors", max_shard_bytes=size),
        "staging_bytes": lambda: fst.prepare_update(nn.Linear(4, 3), FILE, staging_bytes=size),
    }


def values(tensors, *others, **arguments):
    """Saves of tensors that cannot be saved."""
    calls = {
        "save_file": lambda: fst.save_file(tensors, "o.safetensors", **arguments),
        "save_file_async": lambda: fst.save_file_async(tensors, "o.safetensors", **arguments),
        "torch": lambda: fst.torch.save_file(tensors, "o.safetensors", **arguments),
        "torch bytes": lambda: fst.torch.save(tensors, **arguments),
    }
    if "operator" in others:
        calls["operator"] = lambda: operators.save_file(list(tensors.values()), list(tensors), "o.safetensors")
    return {name: call for name, call in calls.items() if not name.startswith("torch") or "torch" in others}


def outputs(tensor):
    return {
        "into": lambda: fst.load_into(FILE, ["weight"], [tensor]),
        "operator": lambda: operators.load_into([FILE], ["weight"], [tensor]),
    }


def slices(*numbers):
    return {
        "slices": lambda: fst.load_slices(FILE, ["weight"], *numbers),
        "operator": lambda: operators.load_slices([FILE], ["weight"], *numbers),
    }


def modules(make):
    return {
        "module": lambda: fst.load_module(make(), FILE),
        "update": lambda: fst.prepare_update(make(), FILE),
        "load_model": lambda: fst.torch.load_model(make(), FILE),
    }


class Model(nn.Module):
    """The tensors of the file, in a module that another one may wrap."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.bias = nn.Parameter(torch.zeros(4))


def wrapped(name, model):
    outer = nn.Module()
    outer.add_module(name, model)
    return outer


def layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fst.save_file(model.state_dict(), "layers.safetensors")
    model[0] = torch.compile(model[0])
    return model


def averaged():
    return torch.optim.swa_utils.AveragedModel(Model())


class WithState(Model):
    def get_extra_state(self):
        return {"step": 3}

    def set_extra_state(self, state):
        pass


class WithBuffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", torch.ones(2), persistent=False)


def closed():
    file = fst.safe_open(FILE)
    file.close()
    return file


def freed():
    tensor = torch.ones(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def in_graph(call):
    """Calls a function with the fakes that compilers use."""
    with FakeTensorMode():
        return call()


def opened():
    with open(FILE, "rb") as file:
        return file
