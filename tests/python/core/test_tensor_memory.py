"""Tensors whose elements are not in memory of their own, passed to every operator and method that takes tensors."""

import inspect

import pytest
import torch

import fst
from saved import KEY, write_each


def kinds():
    """Yields names and functions that create tensors without memory, or with other memory than their sizes need.

    Programs in processes of their own have this source.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    class Wrapper(torch.Tensor):
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (32,), dtype=torch.uint8)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(str(function))

    def resized(size):
        tensor = torch.ones(32, dtype=torch.uint8)
        tensor.untyped_storage().resize_(size)
        return tensor

    def dtensor():
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return DTensor.from_local(torch.ones(32, dtype=torch.uint8), init_device_mesh("cpu", (1,)), [Replicate()])

    ones = torch.ones(32, dtype=torch.uint8)
    yield "wrapper", Wrapper
    yield "DTensor", dtensor
    yield "FakeTensor", lambda: FakeTensorMode().from_tensor(ones)
    yield "ZeroTensor", lambda: torch._efficientzerotensor((32,), dtype=torch.uint8)
    yield "freed storage", lambda: resized(0)
    yield "short storage", lambda: resized(31)
    yield "functional", lambda: torch._to_functional_tensor(ones)
    yield "meta", lambda: ones.to("meta")
    yield "sparse", ones.to_sparse
    yield "nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield "jagged", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    # These have memory, but PyTorch ends the process if it allocates a copy from their options.
    channels = torch.quantize_per_channel(torch.ones(4, 8), torch.ones(4), torch.zeros(4), 0, torch.qint8)
    yield "quantized", lambda: torch.quantize_per_tensor(torch.ones(32), 0.1, 0, torch.quint8)
    yield "quantized columns", torch.quantize_per_tensor(torch.ones(4, 8), 0.1, 0, torch.qint32).t
    yield "quantized channels", channels.detach


# Calls with a tensor `t`. `classes` and `ops` are PyTorch's.
CALLS = {
    "Writer.write": 'classes.Writer("new").write("x", t)',
    "Writer.write with a kind": 'classes.Writer("new", None, True).write("x", t, (0, 0))',
    "EncryptionKey": 'classes.EncryptionKey(t, "")',
    "EncryptionKey of a passphrase": 'classes.EncryptionKey(t, "", [1, 1 << 20])',
    "EncryptionKey salt": 'classes.EncryptionKey(key, "", [1, 8192], t)',
    "EncryptionKey.derive string": "classes.EncryptionKey.derive(t, [1, 8192], key[:16], key.clone())",
    "EncryptionKey.derive salt": "classes.EncryptionKey.derive(key, [1, 8192], t, key.clone())",
    "EncryptionKey.derive key": "classes.EncryptionKey.derive(key, [1, 8192], key[:16], t)",
    "Checkpoint": 'classes.Checkpoint(["a"], t, "", None)',
    "Checkpoint.load_into": 'classes.Checkpoint(["a"]).load_into(["x"], [t])',
    "Checkpoint.load_into regions": 'classes.Checkpoint(["a"]).load_into(["x"], [t], ([0], [32], [1]))',
    "Checkpoint.load_into rules": 'classes.Checkpoint(["a"]).load_into(["y"], [t], rules=["y = x"])',
    "Checkpoint.load_views_into": "classes.Checkpoint.load_views_into([classes.Checkpoint(['a'])], STORED, [], [t])",
    "Checkpoint.load_views_into held": "classes.Checkpoint.load_views_into([], HELD, [t], [key.clone()])",
    "Source.read": 'classes.Source("a").read(0, t)',
    "Update target": "write([t], [None], [key])",
    "Update positions": "write([key.clone()], [t], [key])",
    "Update values": "write([key.clone()], [None], [t])",
    "LoadPlan": 'classes.LoadPlan(classes.Checkpoint(["a"]), t, request)',
    "RanksLoad": "classes.RanksLoad(plan, 0, [t], torch.device('cpu'))",
    "RanksLoad.read": "classes.RanksLoad(plan, 0, [key.clone()], torch.device('cpu')).read(0, t)",
    "RanksLoad.unpack": "classes.RanksLoad(plan, 0, [key.clone()], torch.device('cpu')).unpack(0, t)",
    "Memory.check": 'classes.Memory.check("x", t)',
    "Memory.copy": 'classes.Memory.copy("x", t)',
    "Memory.is_mapped": "assert not classes.Memory.is_mapped(t)",
    "save_file": 'ops.save_file([t], ["x"], "new")',
    "_save_shard": 'ops._save_shard([t], ["x"], "new", None, "")',
    "load_into": 'ops.load_into(["a"], ["x"], [t])',
    "load_recipe_into": 'ops.load_recipe_into(["a"], ["y"], ["y = x"], [t])',
    "cast": "ops.cast([t], dtype=torch.float32)",
    "scatter": "ops.scatter(t, [0], [0], [4], [1])",
    "serialize": 'ops.serialize([t], ["x"])',
    "fst.save_file": 'fst.save_file({"x": t}, "new")',
    "fst.save_file_async": 'fst.save_file_async({"x": t}, "new").result()',
}

NAMES_TENSOR = {
    "Writer.write",
    "Writer.write with a kind",
    "Memory.check",
    "Memory.copy",
    "fst.save_file",
}

PROGRAM = f"""
import json
import os

import fst
import torch

{inspect.getsource(kinds)}
classes, ops = torch.classes.fst, torch.ops.fst
key = torch.ones(32, dtype=torch.uint8)
fst.save_file({{"x": key}}, "a")
request = dict(lengths=[4], list_of_rank=[0], caches=[-1], strategy="auto", window_bytes=1 << 20)
request = json.dumps(request)
plan = classes.LoadPlan(classes.Checkpoint(["a"]), torch.tensor([1, 2, 0, 0]), request)


STORED = '{{"bases": [{{"stored": 0}}], "views": [0]}}'
HELD = '{{"bases": [{{"held": [0, 0, [32]]}}], "views": [0]}}'


def write(*lists):
    update = classes.Update([], [])
    update.stage(*lists, None)
    update.commit()


def report(name, kind, run):
    # Written before the call, which must not end the process.
    os.write(1, f"\\n{{name}}, {{kind}}: ".encode())
    try:
        run()
        result = "done"
    except Exception as error:
        result = " ".join(str(error).split())
    os.write(1, result.encode())


for name, call in {CALLS!r}.items():
    for kind, create in kinds():
        report(name, kind, lambda: exec(call, globals(), {{"t": create()}}))
    # Inside torch.func.vmap, tensors have no storage that the outside sees.
    mapped = torch.func.vmap(lambda t: (exec(call, globals(), {{"t": t}}), t)[1])
    report(name, "vmap", lambda: mapped(key[None]))
"""

# Operators for which PyTorch replaces the tensor by one with values, or whose fakes take it. A file in tensorizer's
# format has tensors on meta.
MAY_SUCCEED = {
    "Memory.is_mapped",
    "cast",
    "scatter",
    "serialize",
    "save_file",
    "_save_shard",
    "load_into",
    "load_recipe_into",
}


def test_tensors_without_memory_are_errors(fork_python):
    """No call reads or writes memory that a tensor does not have, or ends the process."""
    lines = fork_python(PROGRAM).strip().splitlines()
    results = {tuple(case.split(", ")): result for case, result in (line.split(": ", 1) for line in lines)}
    assert list(results) == [(call, kind) for call in CALLS for kind in [*(name for name, _ in kinds()), "vmap"]]
    for (call, kind), result in results.items():
        # The bytes of quantized tensors can be read.
        if call not in MAY_SUCCEED and (call in NAMES_TENSOR or "quantized" not in kind):
            assert result != "done" or (call, kind) == ("Writer.write with a kind", "meta"), (call, kind)
            if call in NAMES_TENSOR and kind not in ("meta", "jagged", "vmap"):
                assert 'tensor "x": ' in result, (call, kind)
    assert "memory of its own; for a DTensor, pass the local tensor" in results["Checkpoint.load_into", "wrapper"]


class Dispatched(torch.Tensor):
    """Subclass with memory of its own, whose operators run in Python."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """Subclass without operators of its own."""


@pytest.mark.parametrize("encrypted", [False, True])
def test_subclasses_with_memory_are_saved(tmp_path, encrypted):
    values = torch.arange(6.0).view(2, 3)
    tensors = {
        "dispatched": torch.Tensor._make_subclass(Dispatched, values),
        "transposed": torch.Tensor._make_subclass(Dispatched, values).t(),
        "named": values.as_subclass(Named),
        "parameter": torch.nn.Parameter(values),
        "empty": torch.empty(0, 3),
        "conjugate": torch.complex(values, values).conj(),
    }
    options = {"encryption_key": KEY} if encrypted else {}
    write_each(tmp_path / "a", tensors, **options)
    loaded = fst.load_file(tmp_path / "a", **options)
    for name, tensor in tensors.items():
        plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj()
        assert torch.equal(loaded[name], plain), name


@pytest.mark.parametrize("size", [31, 33])
def test_key_is_derived_into_memory_of_its_size(size):
    string, salt = torch.ones(4, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"the key has {size} bytes, but must have 32"):
        torch.classes.fst.EncryptionKey.derive(string, [1, 8192], salt, torch.zeros(size, dtype=torch.uint8))
