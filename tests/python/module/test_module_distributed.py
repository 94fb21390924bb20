"""`fst.load_module` on modules with DTensor parameters: values, layouts, errors and bytes read."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fst
from combinations import pairwise
from rank_processes import on_ranks
from rawfile import assert_all_same, assert_same


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Model whose rows divide evenly where two kinds of sharding combine, and unevenly elsewhere."""

    def __init__(self, vocabulary=13):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 8))
        self.register_buffer("mask", torch.arange(8.0))
        self.register_buffer("angles", torch.linspace(0, 1, 8), persistent=False)
        self.blocks[1].norm.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.angles
        for block in self.blocks:
            x = block(x)
        return x * self.mask + self.scale


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def data_parallel(model):
    """Shards a model over all ranks, unevenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(model):
    """Shards a model over two ranks and replicates it on the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model):
    """Parallelizes some parameters as DTensors and leaves the others plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    return model


def two_dimensional(model):
    """Shards some parameters on a mesh of two dimensions, others on one of the dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    for block in model.blocks:
        parallelize_module(block, mesh["model"], PLAN)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_meta():
    with torch.device("meta"):
        model = Model()
    model.angles = torch.linspace(0, 1, 8)
    return model


def check_parallel(path, parallel, start, dtype):
    """Checks that a parallel model gets the values of a plain model and computes the same."""
    plain = Model()
    plain.load_state_dict(fst.load_file(path))
    plain.to(dtype)
    model = parallel(Model() if start == "memory" else on_meta())
    if start == "empty":
        angles = model.angles
        model.to_empty(device="cpu")
        model.angles = angles
    parameters = dict(model.named_parameters())
    addresses = {
        name: parameter.to_local().data_ptr()
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor)
    }
    layouts = {name: getattr(parameter, "placements", None) for name, parameter in parameters.items()}
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    assert fst.load_module(model, path, dtype=dtype) == ([], [])
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name)
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.is_leaf, parameter.requires_grad) == (True, required[name])
        assert getattr(parameter, "placements", None) == layouts[name]
        assert parameter.device.type == "cpu"
        assert_same(whole(parameter.detach()), expected.detach())
        if start != "meta" and dtype is None and name in addresses:
            assert parameter.to_local().data_ptr() == addresses[name]
    assert_same(model.mask, plain.mask)
    torch.testing.assert_close(model.angles, torch.linspace(0, 1, 8))
    tokens = torch.arange(12).view(3, 4)
    if dtype is None:
        for _ in range(2):
            torch.testing.assert_close(whole(model(tokens)), plain(tokens))
            model(tokens).sum().backward()
        assert model.blocks[0].up.weight.grad is not None
    # A second load works in any state that the forward pass leaves.
    changed = fst.load_file(other(path, "later"))
    fst.load_module(model, other(path, "later"))
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert_same(whole(parameter.detach()), changed[name].to(parameter.dtype))
    if dtype is None:
        plain.load_state_dict(changed)
        torch.testing.assert_close(whole(model(tokens)), plain(tokens))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint of the model, beside others."""
    torch.manual_seed(0)
    model, later = ({name: torch.randn_like(tensor) for name, tensor in Model().state_dict().items()} for _ in range(2))
    blocks = [{name: tensor for name, tensor in model.items() if name.startswith(f"blocks.{i}.")} for i in range(2)]
    files = {
        "model": model,
        "later": later,
        "partial": blocks[1],
        **{f"stage-{i}": {name[9:]: tensor for name, tensor in blocks[i].items()} for i in range(2)},
        "crossed": {name: torch.randn(4, 2) for name in "01"},
        "uneven": {f"{rows}.weight": torch.randn(rows, 4) for rows in (5, 9, 16)},
    }
    directory = tmp_path_factory.mktemp("files")
    for name, tensors in files.items():
        save_file(tensors, directory / f"{name}.safetensors")
    return str(directory / "model.safetensors")


def other(path, name):
    """Returns the path of another checkpoint of the fixture."""
    return path.replace("model.safetensors", f"{name}.safetensors")


@pytest.mark.parametrize(
    ("parallel", "start", "dtype"),
    pairwise(
        [data_parallel, hybrid, tensor_parallel, two_dimensional], ["memory", "meta", "empty"], [None, torch.bfloat16]
    ),
)
def test_parallel_modules(ranks, path, parallel, start, dtype):
    ranks(4).run(check_parallel, path, parallel, start, dtype)


@on_ranks(3)
def test_options_and_kept_state(path):
    """Compares with set_model_state_dict, and checks the state that a load keeps."""
    full = fst.load_file(path)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    expected = data_parallel(Model())
    set_model_state_dict(expected, dict(full), options=StateDictOptions(full_state_dict=True))
    actual = data_parallel(Model().double())
    steps = torch.optim.SGD(actual.parameters(), lr=0.5)
    for parameter in actual.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = [parameter.grad for parameter in actual.parameters()]
    hooked = []
    actual.blocks[0].register_load_state_dict_post_hook(lambda module, keys: hooked.append((module, keys)))
    keys = fst.load_module(actual, path)
    assert hooked == [(actual.blocks[0], keys)]
    for mine, theirs, grad in zip(actual.parameters(), expected.parameters(), grads, strict=True):
        assert mine.to_local().dtype == torch.float64
        assert_same(mine.to_local(), theirs.to_local().double())
        assert mine.grad is grad
    steps.step()
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), theirs.to_local().double() - 0.5)

    # A load with a dtype casts gradients, too.
    fst.load_module(actual, path, dtype=torch.float32)
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        assert_same(mine.to_local(), theirs.to_local())
        assert (mine.grad.dtype, mine.grad.placements) == (torch.float32, mine.placements)
        assert_same(mine.grad.to_local(), torch.ones_like(mine.to_local()))

    # Options of fully_shard.
    for arguments in ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"reshard_after_forward": False}):
        model = fully_shard(on_meta(), mesh=mesh, **arguments)
        for _ in range(2):
            fst.load_module(model, path, device="cpu")
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert_same(mine.to_local(), theirs.to_local())
            model(torch.arange(6).view(2, 3))

    # All parameters and buffers are DTensors.
    model = distribute_module(Model(), mesh)
    assert isinstance(model.mask, DTensor)
    fst.load_module(model, path)
    for name, tensor in model.state_dict().items():
        assert (tensor.placements, type(tensor.to_local())) == ((Replicate(),), torch.Tensor)
        assert_same(tensor.to_local(), full[name])

    # A checkpoint with some of the names. Missing parameters are moved and cast, too.
    model = data_parallel(Model())
    some = [name for name in full if name.startswith("blocks.1")]
    outside = model.scale.to_local().clone()
    keys = fst.load_module(model.blocks[1], other(path, "stage-1"))
    assert keys == ([], [])
    keys = fst.load_module(model, other(path, "partial"), dtype=torch.float16, strict=False)
    assert keys.missing_keys == [name for name in model.state_dict() if name not in some]
    assert_same(model.scale.to_local(), outside.half())
    for name in some:
        assert_same(model.get_parameter(name).full_tensor(), full[name].half())


class Tied(nn.Module):
    """A module with a tied parameter and extra state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@on_ranks(3)
def test_tied_dtensors(tmp_path):
    weight = torch.arange(44.0).view(11, 4)
    others = {f"norm.{name}": torch.full((4,), 0.5) for name in ("weight", "bias", "running_mean", "running_var")}
    others["_extra_state"] = torch.arange(4)

    def file_of(name, **weights):
        path = tmp_path / f"{dist.get_rank()}" / name
        path.parent.mkdir(exist_ok=True)
        save_file(others | {f"{owner}.weight": value.clone() for owner, value in weights.items()}, path)
        return path

    different = file_of("different", head=weight, embedding=weight + torch.eye(11, 4))
    for start in ("cpu", "meta"):
        with torch.device(start):
            model = Tied()
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        with pytest.raises(fst.ModuleMismatchError, match="different values in the checkpoint, one tensor"):
            fst.load_module(model, different)
        for path in (file_of("one", head=weight), file_of("both", head=weight + 1, embedding=weight + 1)):
            assert fst.load_module(model, path) == ([], [])
            assert model.head.weight is model.embedding.weight
            assert_same(model.head.weight.full_tensor().detach(), fst.load_file(path)["head.weight"])
            # Older checkpoints have no such counter.
            assert model.norm.num_batches_tracked == 0
            assert_same(model.state, torch.arange(4))


@on_ranks(4)
def test_errors_on_all_ranks(path):
    """Checks that an error on any rank is raised on all ranks and changes no parameter."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    def refuse(model, match, error=fst.ModuleMismatchError, **arguments):
        before = [parameter.to_local().clone() for parameter in model.parameters() if isinstance(parameter, DTensor)]
        with pytest.raises(error, match=match) as caught:
            fst.load_module(model, **{"paths": path} | arguments)
        after = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
        for left, right in zip(before, after, strict=True):
            assert_same(left, right)
        return caught.value

    larger = two_dimensional(Model(vocabulary=14))
    error = refuse(larger, r'"embedding.weight": shape \[13, 8\] in the checkpoint, \[14, 8\] in the module')
    assert error.misshapen_keys == ["embedding.weight"]
    larger.extra = nn.Linear(2, 2)
    error = refuse(larger, 'missing in the checkpoint: "extra.weight", "extra.bias"')
    assert error.missing_keys == ["extra.weight", "extra.bias"]

    summed = Model()
    partial = DTensor.from_local(torch.zeros(1, 8), mesh["data"], [Partial()])
    summed.scale = nn.Parameter(partial, requires_grad=False)
    refuse(summed, r'"scale": its placements \(Partial\(sum\),\) include a pending reduction')

    # Failures of one rank.
    missing = f"{path}.missing" if rank == 2 else path
    refuse(two_dimensional(Model()), "missing", FileNotFoundError if rank == 2 else fst.RankError, paths=missing)
    odd = two_dimensional(Model())
    if rank == 1:
        odd.register_buffer("mine", torch.zeros(1))
    refuse(odd, "mine", fst.ModuleMismatchError if rank == 1 else fst.RankError)
    refuse(
        two_dimensional(Model()),
        "floating",
        ValueError if rank == 0 else fst.RankError,
        dtype=torch.int8 if rank == 0 else None,
    )

    # Autograd detects that saved tensors have changed.
    model = tensor_parallel(Model())
    result = whole(model(torch.arange(6).view(2, 3))).sum()
    fst.load_module(model, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()

    # No mesh contains all ranks.
    crossed = nn.ParameterList(
        [
            distribute_tensor(torch.zeros(4, 2), mesh["data"], [Shard(0)]),
            distribute_tensor(torch.zeros(4, 2), mesh["model"], [Shard(0)]),
        ]
    )
    save = other(path, "crossed")
    with pytest.raises(
        ValueError, match="no mesh contains all of these ranks; pass the ranks that load together as group="
    ):
        fst.load_module(crossed, save)
    fst.load_module(crossed, save, group=dist.group.WORLD)
    assert_all_same({f"{i}": weight.full_tensor() for i, weight in enumerate(crossed)}, fst.load_file(save))
    check_parallel(path, two_dimensional, "memory", None)


@on_ranks(8)
def test_meshes_with_some_ranks(path):
    """Loads two pipeline stages on separate ranks, and onto meshes that lack some ranks."""
    rank = dist.get_rank()
    full = fst.load_file(path)
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "data", "model"))
    cube["data", "model"]._flatten("stage")
    stage = Model().blocks[cube.get_local_rank("stages")]
    parallelize_module(stage, cube["model"], PLAN)
    fully_shard(stage, mesh=cube["data"])
    prefix = f"blocks.{cube.get_local_rank('stages')}."
    fst.load_module(stage, other(path, f"stage-{prefix[7]}"))
    for name, parameter in stage.named_parameters():
        assert_same(parameter.full_tensor().detach(), full[prefix + name])

    model = Model()
    mesh = DeviceMesh("cpu", [1, 6])
    model.embedding.weight = nn.Parameter(distribute_tensor(model.embedding.weight.detach(), mesh, [Shard(1)]))
    fst.load_module(model, path)
    expected = distribute_tensor(full["embedding.weight"], mesh, [Shard(1)])
    assert_same(model.embedding.weight.to_local().detach(), expected.to_local())
    assert_same(model.scale.detach(), full["scale"])

    # A process loads a module without DTensors by itself, or with a group if one is given.
    plain = Model()
    if rank == 3:
        fst.load_module(plain, path)
        assert_same(plain.scale.detach(), full["scale"])
    # Without a page cache that the ranks share.
    with pytest.MonkeyPatch.context() as patch, fst.profile() as recorded:
        patch.setenv("FST_READER", "pread")
        fst.load_module(plain, path, group=dist.group.WORLD)
    assert_all_same(plain.state_dict(), full)
    read = torch.tensor(recorded.summary().read_bytes)
    dist.all_reduce(read)
    total = sum(tensor.nbytes for tensor in full.values())
    assert total <= read < 1.05 * total


@on_ranks(4, 8)
def test_uneven_rows_sharded_twice(path):
    """Loads a dimension that is sharded twice. PyTorch assigns wrong rows to some ranks if it divides unevenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    for name, weight in fst.load_file(other(path, "uneven")).items():
        rows = name.partition(".")[0]
        model = nn.Sequential(OrderedDict({rows: nn.Linear(4, len(weight), bias=False)}))
        parallelize_module(model, mesh["model"], {rows: ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        if rows == "9" and mesh.size(0) == 4:
            with pytest.raises((fst.ModuleMismatchError, fst.RankError), match="has to divide evenly"):
                fst.load_module(model, other(path, "uneven"), strict=False)
            continue
        fst.load_module(model, other(path, "uneven"), strict=False)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(x), x @ weight.chunk(2)[mesh.get_local_rank("model")].T)
