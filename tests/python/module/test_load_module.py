"""`fst.load_module`: in place or into new storage, with ties, casts, hooks and collected errors."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize

import fst
from combinations import pairwise
from fst._checkpoint import batched
from fst._checkpoint.region import Region
from rawfile import assert_all_same, assert_same, bits_of, random_raw


class Embedder(nn.Module):
    """Parameters and buffers of several dtypes, persistent and not, in nested modules."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.conv = nn.Conv2d(3, 4, 5)
        self.register_buffer("counts", torch.arange(7))
        self.register_buffer("angles", torch.linspace(0, 1, 5), persistent=False)
        self.register_parameter("nothing", None)
        self.layers[1].requires_grad_(False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def randomized(module):
    """Fills the state of a module with pseudo-random integers and returns the module."""
    for index, tensor in enumerate(module.state_dict().values()):
        generator = torch.Generator().manual_seed(index)
        tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=generator))
    return module


def save_state(module, path, **changes):
    """Saves the state of a module with some tensors replaced, or left out if the replacement is None."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


@pytest.fixture
def path(tmp_path):
    return save_state(randomized(Embedder()), tmp_path / "model.safetensors")


def assert_loaded(module, path, dtype=None):
    """Checks that the module equals one loaded by load_state_dict."""
    expected = Embedder().to(dtype)
    expected.load_state_dict(fst.load_file(path))
    assert_all_same(module.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("reader")
def test_load_in_place(path):
    module = Embedder()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    kept = {name: (id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors.items()}
    with fst.profile() as recorded:
        keys = fst.load_module(module, path)
    assert keys == ([], [])
    assert str(keys) == "<All keys matched successfully>"
    assert_loaded(module, path)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert {name: (id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors.items()} == kept
    torch.testing.assert_close(module.angles, torch.linspace(0, 1, 5))
    # Matched and loaded tensors come from the same version of the file.
    assert recorded.summary().stages["header"].spans == 1


@pytest.mark.usefixtures("reader")
def test_meta_parameters_get_storage(path):
    module = on_meta(Embedder)
    module.angles = torch.linspace(0, 1, 5)
    parameters = dict(module.named_parameters())
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    fst.load_module(module, path)
    assert_loaded(module, path)
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad == required[name]
        assert parameter.is_leaf
    # An optimizer of the meta parameters steps the loaded ones.
    expected = module.embedding.weight.detach().clone()
    expected[3] -= 1
    module.embedding(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert_same(module.embedding.weight.detach(), expected)


def test_devices_and_bad_arguments(path):
    module = on_meta(Embedder)
    module.angles = torch.zeros(5)
    with pytest.raises(ValueError, match="meta"), torch.device("meta"):
        fst.load_module(module, path)
    with pytest.raises(ValueError, match="meta"):
        fst.load_module(module, path, device="meta")
    with pytest.raises(ValueError, match=r"^cpu:3 is not available"):
        fst.load_module(module, path, device="cpu:3")
    with pytest.raises(ValueError, match="floating-point"):
        fst.load_module(module, path, dtype=torch.int32)
    with pytest.raises(TypeError, match="dict"):
        fst.load_module({}, path)
    with pytest.raises(FileNotFoundError):
        fst.load_module(module, path.with_name("none.safetensors"))
    with torch.device("cpu"):
        fst.load_module(module, path)
    assert_loaded(module, path)


@pytest.mark.parametrize(("dtype", "start"), [(torch.bfloat16, "meta"), (torch.float16, "cpu"), (torch.float64, "cpu")])
def test_dtype(path, dtype, start):
    module = Embedder() if start == "cpu" else on_meta(Embedder)
    module.angles = torch.linspace(0, 1, 5)
    parameters = dict(module.named_parameters())
    module.embedding.weight.grad = torch.ones_like(module.embedding.weight)
    fst.load_module(module, path, dtype=dtype)
    assert_loaded(module, path, dtype)
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert module.counts.dtype == torch.int64
    # A non-persistent buffer is not in the checkpoint and keeps its dtype.
    assert module.angles.dtype == torch.float32
    if start == "cpu":
        assert module.embedding.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float8_e5m2])
def test_casts_in_place(tmp_path, dtype):
    """In-place casts equal load_state_dict's and keep the storage."""
    tensors = {}
    for index, name in enumerate(["F16", "BF16", "F32", "F64", "I64", "F8_E4M3", "BOOL"]):
        tensor = random_raw(name, [(7, 5, 3), (), (0, 4)][index % 3]).tensor()
        # Casts of numbers outside an integer's range are undefined.
        is_float = tensor.is_floating_point()
        tensors[name] = tensor.float().nan_to_num().clamp(-100, 100).to(tensor.dtype) if is_float else tensor
    path = tmp_path / "cast.safetensors"
    save_file(tensors, path)
    for meta in (False, True):
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, torch.zeros(tensor.shape, dtype=dtype, device="meta" if meta else None))
        addresses = [buffer.data_ptr() for buffer in module.buffers() if not meta]
        fst.load_module(module, path)
        for name, tensor in tensors.items():
            assert_same(getattr(module, name), torch.zeros(tensor.shape, dtype=dtype).copy_(tensor))
        assert [buffer.data_ptr() for buffer in module.buffers() if not meta] == addresses


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 64))
def test_split_regions_cover_tensor_once(shape, elements_max):
    covered = torch.zeros(shape)
    for region in Region.whole(shape).split(elements_max):
        region.view(covered).add_(1)
        assert region.view(covered).numel() <= elements_max
    assert covered.eq(1).all()


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("start", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_memory_format_subclass_and_attributes_are_kept(tmp_path, start, dtype):
    source = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
    path = save_state(source, tmp_path / "conv.safetensors")
    module = copy.deepcopy(source).to(start)
    module.weight = weight = Special(torch.empty_like(module.weight), requires_grad=False)
    weight.loader = "mine"
    fst.load_module(module, path, dtype=dtype)
    assert module.weight is weight
    assert type(weight) is Special
    assert weight.loader == "mine"
    assert (weight.requires_grad, module.bias.requires_grad) == (False, True)
    assert weight.stride() == source.weight.stride()
    assert_same(weight.detach(), source.weight.detach().to(dtype or torch.float32))


@pytest.mark.parametrize(
    ("start", "dtype", "left_out"),
    pairwise(["meta", "cpu", "shared storage"], [None, torch.bfloat16], [[], ["embedding.weight"], ["head.weight"]]),
)
def test_tied_parameters(tmp_path, start, dtype, left_out):
    source = randomized(Tied())
    path = save_state(source, tmp_path / "tied.safetensors", **dict.fromkeys(left_out))
    module = on_meta(Tied) if start == "meta" else Tied()
    if start == "shared storage":
        module.head.weight = nn.Parameter(module.embedding.weight.data)
    assert fst.load_module(module, path, dtype=dtype) == ([], [])
    assert (module.head.weight is module.embedding.weight) == (start != "shared storage")
    assert module.head.weight.data_ptr() == module.embedding.weight.data_ptr()
    assert torch.equal(module.head.weight, source.head.weight.to(dtype))


def test_tied_parameters_with_different_values(tmp_path, monkeypatch):
    source = randomized(Tied())
    other = source.head.weight.detach().clone()
    other[-1, -1] += 1
    path = save_state(source, tmp_path / "untied.safetensors", **{"head.weight": other})
    for batch_bytes in (batched.BATCH_BYTES, 64):
        monkeypatch.setattr(batched, "BATCH_BYTES", batch_bytes)
        module = Tied()
        before = bits_of(module.head.weight)
        with pytest.raises(fst.ModuleMismatchError, match=r'"embedding\.weight", "head\.weight": different values'):
            fst.load_module(module, path, strict=False)
        assert bits_of(module.head.weight) == before
    # Equal NaNs do not count as different values.
    same = torch.full_like(other, torch.nan)
    save_state(source, path, **{"head.weight": same, "embedding.weight": same.clone()})
    fst.load_module(module, path)
    assert module.head.weight.isnan().all()


def test_all_mismatches_in_one_error(path, tmp_path):
    module = Embedder()
    module.layers[0][0] = nn.Linear(8, 9)
    module.extra = nn.Linear(2, 2)
    del module.conv
    module.ghost = on_meta(lambda: nn.BatchNorm1d(3, track_running_stats=False, affine=False))
    module.ghost.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    before = {name: bits_of(tensor) for name, tensor in module.state_dict().items()}
    with pytest.raises(fst.ModuleMismatchError) as caught:
        fst.load_module(module, path)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.missing_keys == ["extra.weight", "extra.bias"]
    assert sorted(error.unexpected_keys) == ["conv.bias", "conv.weight"]
    assert error.misshapen_keys == ["layers.0.0.weight", "layers.0.0.bias"]
    message = str(error)
    assert str(path) in message
    for part in (
        "Embedder",
        '"layers.0.0.weight": shape [8, 8] in the checkpoint, [9, 8] in the module',
        'missing in the checkpoint: "extra.weight", "extra.bias"',
        '"conv.weight"',
        '"ghost.angles"',
    ):
        assert part in message
    assert {name: bits_of(tensor) for name, tensor in module.state_dict().items()} == before


def test_child_that_is_none(path):
    """Names under a child that is None are not unexpected, as with load_state_dict."""
    module = Embedder()
    module.conv = None
    assert fst.load_module(module, path) == module.load_state_dict(fst.load_file(path)) == ([], [])


def test_not_strict(path):
    module = Embedder()
    module.extra = nn.Linear(2, 2)
    module.extra.bias = nn.Parameter(torch.zeros(2, device="meta"))
    del module.conv
    module.angles = torch.zeros(5, device="meta")
    extra = module.extra.weight.detach().clone()
    keys = fst.load_module(module, path, device="cpu", strict=False, dtype=torch.bfloat16)
    assert keys.missing_keys == ["extra.weight", "extra.bias"]
    assert sorted(keys.unexpected_keys) == ["conv.bias", "conv.weight"]
    assert module.angles.is_meta
    assert module.extra.bias.is_meta
    # `dtype` applies to parameters that the checkpoint lacks, too.
    assert torch.equal(module.extra.weight, extra.to(torch.bfloat16))
    assert torch.equal(module.counts, fst.load_file(path)["counts"])
    module.layers[0][0] = nn.Linear(8, 9)
    with pytest.raises(fst.ModuleMismatchError, match=r"layers\.0\.0\.weight"):
        fst.load_module(module, path, strict=False)


def test_parametrizations(tmp_path):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    def make():
        module = nn.Linear(4, 4)
        parametrize.register_parametrization(module, "weight", Symmetric())
        return module

    source = make()
    path = save_state(source, tmp_path / "symmetric.safetensors")
    assert "parametrizations.weight.original" in fst.tensor_names(path)
    module = make()
    fst.load_module(module, path)
    assert torch.equal(module.weight, source.weight)


@pytest.mark.parametrize(("start", "tracked"), [("cpu", 1), ("meta", 0)])
def test_batch_norm_without_num_batches_tracked(tmp_path, start, tracked):
    source = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    source(torch.randn(4, 3))
    path = save_state(source, tmp_path / "old.safetensors", **{"0.num_batches_tracked": None})
    module = copy.deepcopy(source).to(start)
    assert fst.load_module(module, path) == ([], [])
    # load_state_dict keeps the counter of a module in memory, too.
    assert_same(module[0].num_batches_tracked, torch.tensor(tracked))
    assert_same(module[0].running_mean, source[0].running_mean)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_state(tmp_path):
    source = nn.Sequential(Stateful(2, 2))
    source[0].state = torch.arange(3)
    path = save_state(source, tmp_path / "extra.safetensors")
    module = nn.Sequential(Stateful(2, 2))
    assert fst.load_module(module, path) == ([], [])
    assert_same(module[0].state, torch.arange(3))
    with pytest.raises(fst.ModuleMismatchError, match=r'missing in the module: "0\._extra_state"'):
        fst.load_module(nn.Sequential(nn.Linear(2, 2)), path)
    save_state(nn.Sequential(nn.Linear(2, 2)), path)
    with pytest.raises(fst.ModuleMismatchError, match=r'missing in the checkpoint: "0\._extra_state"'):
        fst.load_module(module, path)


def test_hooks_that_rename(tmp_path):
    source = nn.Linear(2, 3)
    path = tmp_path / "old.safetensors"
    save_file({"inner.kernel": source.weight.detach(), "inner.bias": source.bias.detach()}, path)

    def rename(module, state, prefix, *_):
        state[prefix + "weight"] = state.pop(prefix + "kernel")

    ended = []
    module = nn.Module()
    module.inner = nn.Linear(2, 3)
    module.inner.register_load_state_dict_pre_hook(rename)
    module.register_load_state_dict_post_hook(lambda owner, keys: ended.append((owner, keys)))
    module.inner.register_load_state_dict_post_hook(lambda owner, keys: ended.append((owner, keys)))
    assert fst.load_module(module, path) == ([], [])
    assert ended == [(module.inner, ([], [])), (module, ([], []))]
    assert torch.equal(module.inner.weight, source.weight)


def test_lazy_modules(tmp_path):
    source = nn.Linear(2, 3)
    path = save_state(source, tmp_path / "linear.safetensors")
    module = nn.LazyLinear(3)
    fst.load_module(module, path)
    inputs = torch.randn(4, 2)
    assert torch.equal(module(inputs), source(inputs))
    # Parameters without a stored value stay uninitialized.
    missing = fst.load_module(nn.Sequential(nn.LazyLinear(3)), path, dtype=torch.bfloat16, strict=False).missing_keys
    assert missing == ["0.weight", "0.bias"]


class Own(nn.Linear):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


def transpose(module, state, prefix, *_):
    state[prefix + "weight"] = state[prefix + "weight"].T


def test_modules_that_are_refused(tmp_path):
    path = save_state(nn.Linear(3, 3), tmp_path / "linear.safetensors")
    hooked, sparse = nn.Linear(3, 3), nn.Linear(3, 3)
    hooked.register_load_state_dict_pre_hook(transpose)
    sparse.weight = nn.Parameter(torch.zeros(3, 3).to_sparse())
    for module, message in [
        (hooked, r'"weight".*load_state_dict'),
        (nn.Sequential(Own(3, 3)), r'module "0": Own.*load_state_dict'),
        (sparse, '"weight": it is not dense'),
    ]:
        with pytest.raises(fst.ModuleMismatchError, match=message):
            fst.load_module(module, path)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_read_error_changes_no_parameter(tmp_path, monkeypatch, dtype):
    """After a failed load, meta tensors are still on meta, and tensors to be replaced keep their values."""
    path = save_state(randomized(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))), tmp_path / "cut.safetensors")
    module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300, device="meta"))
    before = bits_of(module[0].weight)
    monkeypatch.setenv("FST_READER", "pread")

    def cut(*_):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100_000)

    # The last hook runs after the headers are read and before the data is.
    module[1].register_load_state_dict_pre_hook(cut)
    with pytest.raises((OSError, fst.SafetensorError)):
        fst.load_module(module, path, dtype=dtype)
    assert module[1].weight.is_meta
    assert module[0].weight.dtype == torch.float32
    if dtype is not None:
        assert bits_of(module[0].weight) == before


def test_peak_memory(tmp_path, fork_python):
    """An in-place load, with a cast or without, needs memory for staging and a few batches, not for a second model."""
    path = tmp_path / "large.safetensors"
    save_file({"weight": torch.ones(16384, 4096, dtype=torch.bfloat16)}, path)
    program = """
import sys, torch, fst
from procfs import peak_mib
for dtype in (torch.bfloat16, torch.float32):
    linear = torch.nn.Linear(4096, 16384, bias=False, dtype=dtype)
    linear.weight.data.zero_()
    print(peak_mib(lambda: fst.load_module(linear, sys.argv[1])))
    assert linear.weight.eq(1).all()
"""
    for used in fork_python(program, str(path), FST_READER="pread", FST_STAGING_BYTES=str(16 << 20)).split():
        # The tensor takes 128 MiB in the file.
        assert int(used) < 100


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("device", "start", "dtype"),
    pairwise(["cuda", torch.device("cuda", 0), 0], ["meta", "cpu", "cuda"], [None, torch.bfloat16]),
)
def test_gpu(path, device, start, dtype):
    module = Embedder().to(start)
    module.angles = torch.linspace(0, 1, 5)
    parameters = dict(module.named_parameters())
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    fst.load_module(module, path, device=device, dtype=dtype)
    assert_loaded(module, path, dtype)
    assert {tensor.device for tensor in (*module.parameters(), *module.buffers())} == {torch.device("cuda", 0)}
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    if start == "cuda" and dtype is None:
        assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    module.embedding(torch.tensor([1], device="cuda")).sum().backward()
    # A cast in place.
    module.double()
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    fst.load_module(module, path)
    assert_loaded(module, path, torch.float64)
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
