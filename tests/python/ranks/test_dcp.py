"""`fst.dcp.StorageReader`: equality with PyTorch's reader, planners, errors, groups and bytes read."""

import dataclasses
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fst
import fst.dcp
from fst._checkpoint.region import Region
from fst._ranks.layout import REPLICATED, MeshLayout
from fst._ranks.shards import symbol_of
from rank_processes import on_ranks
from rawfile import assert_all_same, assert_same, random_raw, write
from saved import KEY

SHAPES = {"matrix": (10, 7), "vector": (9,), "scalar": (), "none": (0, 3), "even": (16, 8)}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def directory(tmp_path):
    """A checkpoint of two files, with an index."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    (tmp_path / "checkpoint").mkdir()
    fst.save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", max_shard_bytes=400)
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 1
    return str(tmp_path / "checkpoint")


def load(state_dict, path, planner=None, **arguments):
    dcp.load(state_dict, storage_reader=fst.dcp.StorageReader(path, **arguments), planner=planner)


def zeros(**dtypes):
    return {name: torch.zeros(shape, dtype=dtypes.get(name)) for name, shape in SHAPES.items()}


def assert_loaded(state_dict, path, **options):
    loaded = fst.load_file(path, **options).items()
    assert_all_same(state_dict, {name: tensor.to(state_dict[name].dtype) for name, tensor in loaded})


def test_load_in_place(directory):
    state_dict = zeros(matrix=torch.float64, vector=torch.bfloat16, even=torch.int32)
    before = dict(state_dict)
    state_dict["even"] = before["even"] = torch.zeros(8, 16, dtype=torch.int32).t()
    load(state_dict, directory)
    assert all(state_dict[name] is tensor for name, tensor in before.items())
    assert_loaded(state_dict, directory)


def test_metadata_matches_pytorch(directory, tmp_path):
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64, torch.uint32]
    tensors = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in dtypes}
    (tmp_path / "dtypes").mkdir()
    save_file(tensors, tmp_path / "dtypes" / "model.safetensors")
    for path in (directory, str(tmp_path / "dtypes")):
        actual = fst.dcp.StorageReader(path).read_metadata()
        expected = HuggingFaceStorageReader(path).read_metadata()
        assert actual.state_dict_metadata == expected.state_dict_metadata
        assert actual.storage_meta is not None


def test_checkpoint_id(directory, tmp_path):
    reader = fst.dcp.StorageReader(tmp_path / "nothing yet")
    state_dict = zeros()
    dcp.load(state_dict, checkpoint_id=directory, storage_reader=reader)
    assert_loaded(state_dict, directory)
    assert reader.checkpoint_id == reader.path == directory
    assert reader.read_metadata().storage_meta.checkpoint_id == directory
    assert fst.dcp.StorageReader.validate_checkpoint_id(directory)
    assert not fst.dcp.StorageReader.validate_checkpoint_id(tmp_path)
    assert not fst.dcp.StorageReader.validate_checkpoint_id(tmp_path / "nothing")


def test_without_a_state_dict(directory):
    """PyTorch builds a state dict from the metadata, for all names or for some."""
    everything = _load_state_dict_from_keys(storage_reader=fst.dcp.StorageReader(directory))
    assert_loaded(everything, directory)
    some = _load_state_dict_from_keys({"vector"}, storage_reader=fst.dcp.StorageReader(directory))
    assert list(some) == ["vector"]
    assert_same(some["vector"], everything["vector"])


def test_missing_names(directory):
    state_dict = zeros() | {"other": torch.ones(3)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: other"):
        load(state_dict, directory)
    load(state_dict, directory, DefaultLoadPlanner(allow_partial_load=True))
    assert_same(state_dict.pop("other"), torch.ones(3))
    assert_loaded(state_dict, directory)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"vector": torch.ones(8)}, directory)


class Halving(DefaultLoadPlanner):
    """Planner that reads each tensor in two parts into its own tensors, and commits half of the values."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[part for item in plan.items for part in self.parts(item)])

    def parts(self, item):
        if not item.lengths or item.lengths[0] < 2:
            return [item]
        half = item.lengths[0] // 2
        return [
            dataclasses.replace(
                item,
                dest_offsets=torch.Size([item.dest_offsets[0] + start, *item.dest_offsets[1:]]),
                storage_offsets=torch.Size([item.storage_offsets[0] + start, *item.storage_offsets[1:]]),
                lengths=torch.Size([length, *item.lengths[1:]]),
            )
            for start, length in ((half, item.lengths[0] - half), (0, half))
        ]

    def resolve_tensor(self, read_item):
        return torch.full_like(super().resolve_tensor(read_item), torch.nan)

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor / 2)


def test_planner_with_its_own_tensors(directory):
    state_dict = zeros()
    load(state_dict, directory, Halving(flatten_state_dict=False))
    assert_all_same(state_dict, {name: tensor / 2 for name, tensor in fst.load_file(directory).items()})


class Planner(DefaultLoadPlanner):
    """Planner that replaces the plan prepared by the reader, with changes of each item."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def finish_plan(self, new_plan):
        return LoadPlan([dataclasses.replace(item, **self.changes) for item in new_plan.items])


def test_invalid_plans(directory):
    def check(message, **changes):
        with pytest.raises(CheckpointException, match=message):
            load({"vector": torch.zeros(9)}, directory, Planner(**changes))

    check(r'checkpoint: the planner reads "vector" as bytes', type=LoadItemType.BYTE_IO)
    check(r'checkpoint: tensor "other": the planner requests a chunk', storage_index=MetadataIndex("other"))
    check(r'"vector": the planner requests a chunk at \[3\]', storage_index=MetadataIndex("vector", [3]))
    check(r'tensor "vector"', storage_offsets=torch.Size([4]))
    with (
        mock.patch.object(DefaultLoadPlanner, "resolve_tensor", return_value=torch.empty(2)),
        pytest.raises(CheckpointException, match=r'checkpoint: tensor "vector": the planner reads \[9\].*\[2\]'),
    ):
        load({"vector": torch.zeros(9)}, directory)


def test_unreadable_files(directory, tmp_path):
    with pytest.raises(CheckpointException, match=r"FileNotFoundError.*nothing.safetensors"):
        load(zeros(), tmp_path / "nothing.safetensors")
    unsupported = write(tmp_path / "unsupported.safetensors", {"vector": random_raw("F6_E2M3", (8,))})
    with pytest.raises(CheckpointException, match=r"UnsupportedDtypeError.*F6_E2M3"):
        load(zeros(), unsupported)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    reader = fst.dcp.StorageReader(tmp_path / "broken.safetensors")
    with pytest.raises(CheckpointException, match=r"SafetensorError.*broken.safetensors"):
        dcp.load(zeros(), storage_reader=reader)
    metadata = reader.read_metadata()
    for look in (list, len, lambda names: names["vector"]):
        with pytest.raises(fst.SafetensorError, match=r"broken\.safetensors"):
            look(metadata.state_dict_metadata)
    # The reader is still usable.
    state_dict = zeros()
    dcp.load(state_dict, checkpoint_id=directory, storage_reader=reader)
    assert_loaded(state_dict, directory)


def local_of(state_dict):
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state_dict.items()}


def check_layouts(path, saved_by_ranks):
    """Compares with PyTorch's reader on state dicts of plain tensors and DTensors in several layouts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    full = fst.load_file(path)
    layouts = [[Replicate(), Shard(0)], [Shard(-1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]]
    planner = DefaultLoadPlanner(allow_partial_load=True)
    for layout, source in product(layouts, [path, saved_by_ranks]):
        actual, expected = [
            {name: distribute_tensor(t * 0, mesh, layout) if t.ndim == 2 else t * 0 for name, t in full.items()}
            | {"half": torch.zeros(10, 7, dtype=torch.float16)}
            for _ in range(2)
        ]
        load(actual, source, planner)
        dcp.load(expected, storage_reader=HuggingFaceStorageReader(source), planner=planner)
        assert_all_same(local_of(actual), local_of(expected))


@pytest.mark.parametrize("splits", [[0, None], [None, 1], [0, 1], [1, 0], [None, None]])
def test_regions_of_ranks_are_one_layout(splits):
    """Otherwise the requests of each rank would go to all ranks. Regions of some ranks may fit two layouts."""
    shards = [REPLICATED if dim is None else (dim, 1) for dim in splits]
    layouts = set()
    for rank in range(12):
        region = MeshLayout((3, 4), range(12), shards, divmod(rank, 4)).local((24, 36)).region
        found = symbol_of(region, (24, 36), rank, 12)
        assert found.local((24, 36)).region == region
        layouts.add(found.encode())
    assert len(layouts) <= 2
    cut = Region.unit_step((1, 0), (2, 36))
    assert symbol_of(cut, (24, 36), 1, 12) == cut


@on_ranks(2)
def test_encrypted_checkpoint(directory, tmp_path):
    path = tmp_path / "model.safetensors"
    if dist.get_rank() == 0:
        fst.save_file(fst.load_file(directory), path, encryption_key=KEY)
    dist.barrier()
    for group in (None, dist.group.WORLD):
        state_dict = zeros()
        load(state_dict, path, group=group, encryption_key=KEY)
        assert_loaded(state_dict, path, encryption_key=KEY)
    with pytest.raises(CheckpointException, match="encrypted"):
        load(zeros(), path)


def save_parts(directory, path):
    """Saves shards with PyTorch's writer, one file per rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state_dict = {
        name: distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in fst.load_file(path).items()
        if tensor.ndim == 2
    }
    dcp.save(state_dict, storage_writer=HuggingFaceStorageWriter(directory, save_distributed=True))


def test_layouts_and_files_per_rank(ranks, directory, tmp_path):
    ranks(3).run(save_parts, str(tmp_path / "parts"), directory)
    ranks(4).run(check_layouts, directory, str(tmp_path / "parts"))


@on_ranks(4)
def test_bytes_are_read_once(directory):
    """Counts what ranks read in several groups and alone, without a page cache that ranks share."""
    world, rank = dist.group.WORLD, dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]

    def count(reader, **arguments):
        state_dict = zeros()
        with pytest.MonkeyPatch.context() as patch, fst.profile() as recorded:
            patch.setenv("FST_READER", "pread")
            dcp.load(state_dict, storage_reader=reader, **arguments)
        assert_loaded(state_dict, directory)
        return torch.tensor(recorded.summary().read_bytes)

    def check(times, reader, **arguments):
        read = count(reader, **arguments)
        dist.all_reduce(read)
        assert read == times * total

    total = sum(tensor.nbytes for tensor in fst.load_file(directory).values())
    check(1, fst.dcp.StorageReader(directory))
    check(1, fst.dcp.StorageReader(directory, world))
    check(2, fst.dcp.StorageReader(directory, half), process_group=half)
    check(4, fst.dcp.StorageReader(directory), process_group=half)
    check(4, fst.dcp.StorageReader(directory), planner=Planner())
    # A load without collectives needs no other rank.
    if rank == 3:
        assert count(fst.dcp.StorageReader(directory), no_dist=True) == total
    for reader, arguments in (
        (fst.dcp.StorageReader(directory, half), {}),
        (fst.dcp.StorageReader(directory, world), {"process_group": half}),
    ):
        with pytest.raises(CheckpointException, match=r"the call is for . ranks, and the group .* has .; give both"):
            dcp.load(zeros(), storage_reader=reader, **arguments)


class Failing(DefaultLoadPlanner):
    """Planner that fails in one method on one rank."""

    def __init__(self, rank, method):
        super().__init__()
        if dist.get_rank() == rank:
            setattr(self, method, self.fail)

    def fail(self, *arguments):
        raise RuntimeError("the planner of this rank has failed")


@on_ranks(3)
def test_failure_of_one_rank(directory):
    """Checks that all ranks raise if one fails, and that the group can load again."""
    for method in ("create_local_plan", "resolve_tensor", "commit_tensor"):
        for failing in (0, 2):
            with pytest.raises(CheckpointException, match="planner of this rank has failed"):
                load(zeros(), directory, Failing(failing, method), group=dist.group.WORLD)
    mine = directory if dist.get_rank() != 1 else f"{directory}/missing.safetensors"
    for group in (None, dist.group.WORLD):
        with pytest.raises(CheckpointException, match=r"FileNotFoundError.*missing.safetensors"):
            load(zeros(), mine, group=group)
    state_dict = zeros()
    load(state_dict, directory)
    assert_loaded(state_dict, directory)
