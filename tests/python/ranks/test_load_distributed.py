"""`fst.load_distributed`: equality with `distribute_tensor`, arguments, groups and bytes read."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fst
from fst._checkpoint.region import Region
from fst._ranks.layout import MeshLayout
from fst._ranks.meshes import MeshLayouts, mesh_placements
from fst._ranks.shards import Replicated, local_shards, region_of
from rank_processes import on_ranks
from rawfile import DTYPES, assert_all_same, assert_same, random_raw, write

SHAPES = {
    "matrix": (10, 7),
    "rows": (1, 5),
    "even": (16, 8),
    "vector": (9,),
    "none": (0, 4),
    "cube": (4, 3, 5),
    "one": (),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file with a tensor of each shape."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("distributed") / "model.safetensors"
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, path)
    return str(path)


def split(tensor, placement, count):
    if isinstance(placement, Replicate):
        return [tensor] * count
    return placement._split_tensor(tensor, count, with_padding=False)[0]


@st.composite
def layouts(draw):
    """Draws a shape, and a size and a placement for each dimension of a mesh."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4))
    placements = st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)
    return shape, draw(st.lists(st.tuples(st.integers(1, 4), placements), min_size=1, max_size=3))


@given(layout=layouts(), is_known=st.booleans())
def test_local_shards_match_placements(layout, is_known):
    shape, mesh = layout
    counts, placements = zip(*mesh, strict=True)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for coordinate in product(*map(range, counts)):
        expected = full
        for placement, count, index in zip(placements, counts, coordinate, strict=True):
            expected = split(expected, placement, count)[index]
        ranks = range(torch.Size(counts).numel()) if is_known else None
        layout = MeshLayout(counts, ranks, mesh_placements(placements), coordinate)
        assert layout.local(shape).shape == expected.shape
        actual = torch.full(expected.shape, -1)
        for shard, region in local_shards(layout, torch.Size(shape)):
            region.view(actual).copy_(region_of(shard, shape, 0, 1).view(full))
        assert_same(actual, expected)


def test_requests_of_layouts():
    """Requests are equal on all ranks where they can be, and adjacent rows are one region."""

    def layout_of(placements, counts=(4,), coordinate=(1,), ranks=range(4)):
        return MeshLayout(counts, ranks, mesh_placements(placements), coordinate)

    def regions(layout):
        return [shard for shard, _ in local_shards(layout, (8, 6))]

    square = {"counts": (2, 2), "coordinate": (1, 0)}
    assert regions(layout_of([Replicate()])) == [Replicated()]
    assert regions(layout_of([Shard(0), Replicate()], (1, 2), (0, 1), None)) == [Replicated()]
    for layout in (layout_of([Shard(1)]), layout_of([Shard(0), Shard(1)], **square)):
        assert regions(layout) == [layout]
    assert regions(layout_of([Shard(1)], ranks=None)) == [Region.unit_step((0, 2), (8, 2))]
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    assert regions(layout_of(strided, **square, ranks=None)) == [Region.unit_step((2, 0), (2, 6))]
    two = [Region.unit_step((1, 0), (1, 6)), Region.unit_step((5, 0), (1, 6))]
    assert regions(layout_of(strided[:1])) == two


def fitting(layout):
    """Returns a function that gives the layout if it fits a tensor, and replication otherwise."""

    def of(name, shape):
        fits = all(not hasattr(placement, "dim") or -len(shape) <= placement.dim < len(shape) for placement in layout)
        return layout if fits else [Replicate()] * len(layout)

    return of


def check_like_distribute_tensor(path, mesh, layout, **options):
    loaded = fst.load_distributed(path, mesh, fitting(layout), **options)
    expected = fst.load_file(path)
    assert list(loaded) == list(expected)
    for name, full in expected.items():
        actual = loaded[name]
        here = fitting(layout)(name, full.shape)
        # distribute_tensor with a source rank fails for some uneven layouts.
        source = None if any(isinstance(placement, _StridedShard) for placement in here) else 0
        reference = distribute_tensor(full, mesh, here, src_data_rank=source)
        assert isinstance(actual, DTensor)
        assert actual.placements == reference.placements
        assert actual.device_mesh is mesh
        assert (actual.shape, actual.stride(), actual.dtype) == (reference.shape, reference.stride(), reference.dtype)
        assert not actual.requires_grad
        assert_same(actual.to_local(), reference.to_local())
        assert actual.to_local().is_contiguous()


LINES = [[Replicate()], [Shard(0)], [Shard(-1)], [Shard(1)], [_StridedShard(0, split_factor=2)]]
SQUARES = [
    [Replicate(), Shard(0)],
    [Shard(-1), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(-1), Shard(-2)],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [_StridedShard(0, split_factor=3), Replicate()],
]
CUBES = [[Replicate(), Shard(0), Shard(0)], [Shard(0), _StridedShard(0, split_factor=2), Shard(0)]]


def check_layouts_of_parts(mesh):
    """The layouts of parallel parts of a mesh are equal on all ranks."""
    whole, square = MeshLayouts(dist.group.WORLD), mesh["data", "model"]._flatten("square").get_group()
    parts = [(whole, mesh[name]) for name in mesh.mesh_dim_names]
    parts += [(whole, mesh["square"]), (MeshLayouts(square), mesh["model"])]
    encoded = [layouts.of(part, [Shard(0)]).encode() for layouts, part in parts]
    gathered = [None] * mesh.size()
    dist.all_gather_object(gathered, encoded)
    assert [of_rank[:-1] for of_rank in gathered] == [encoded[:-1]] * mesh.size()
    # Ranks of two groups have the same numbers.
    assert [of_rank[-1] for of_rank in gathered] == [(0, 2, 2, 2, 0, 1, 2, 3, -1, 0, 0, 1)] * mesh.size()
    outside = MeshLayouts(mesh["model"].get_group()).of(mesh, [Shard(0), Replicate(), Replicate()])
    assert not outside.is_known


def check_mesh(path, shape, layouts):
    """Loads onto a mesh, and onto the submeshes of one with three dimensions."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "data", "model")[: len(shape)])
    strategies = ["auto", "own", "exchange"]
    for index, layout in enumerate(layouts):
        check_like_distribute_tensor(path, mesh, layout, strategy=strategies[index % 3], window_bytes=256)
    if len(shape) == 3:
        check_layouts_of_parts(mesh)
        square = mesh["data", "model"]
        square._flatten()
        for layout in SQUARES:
            check_like_distribute_tensor(path, square, layout)
        check_like_distribute_tensor(path, mesh["model"], [Shard(0)])


@pytest.mark.parametrize(
    ("shape", "layouts"), [((2,), LINES), ((3,), LINES), ((2, 2), SQUARES), ((1, 4), SQUARES), ((2, 2, 2), CUBES)]
)
def test_meshes(ranks, path, shape, layouts):
    ranks(torch.Size(shape).numel()).run(check_mesh, path, shape, layouts)


@on_ranks(4)
def test_arguments(path):
    """Checks valid arguments and their results, and the errors for invalid ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    line = mesh["model"]
    full = fst.load_file(path)

    loaded = fst.load_distributed(
        path, line, {"cube": Shard(-2), "matrix": [Replicate()], "[mce]*": Shard(0), "*": None}
    )
    assert [(name, tensor.placements) for name, tensor in loaded.items()] == [
        (name, {"cube": (Shard(1),), "matrix": (Replicate(),), "even": (Shard(0),)}[name])
        for name in full
        if name in ("cube", "matrix", "even")
    ]
    [(name, tensor)] = fst.load_distributed([path], line, Replicate(), names=["vector"]).items()
    assert_same(tensor.to_local(), full[name])
    # The default device is ignored.
    with torch.device("meta"):
        loaded = fst.load_distributed(path, mesh, lambda name, shape: [Replicate(), Replicate()], torch.bfloat16)
    local = {name: tensor.to_local() for name, tensor in loaded.items()}
    assert_all_same(local, {name: tensor.bfloat16() for name, tensor in full.items()})
    with pytest.raises(ValueError, match=r"group has the ranks \[0, 1, 2, 3\], and the mesh"):
        fst.load_distributed(path, line, Replicate(), group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"mesh must be a .*DeviceMesh, not ProcessGroup"):
        fst.load_distributed(path, dist.group.WORLD, Replicate())

    def refuse(error, message, placements, **arguments):
        with pytest.raises(error, match=message):
            fst.load_distributed(path, mesh, placements, **arguments)

    refuse(ValueError, r'tensor "none": 1 placements for a mesh of 2 dimensions', Replicate(), names=["none"])
    refuse(ValueError, r'"none": Partial\(sum\) is a pending reduction', [Replicate(), Partial()], names=["none"])
    refuse(
        ValueError,
        r'"one": Shard\(dim=0\) does not fit a tensor of 0 dimensions',
        {"one": [Shard(0)] * 2},
        names=["one"],
    )
    refuse(ValueError, r'"even": Shard\(dim=-3\) does not fit a tensor of 2', {"even": [Shard(-3)] * 2}, names=["even"])
    refuse(TypeError, r'"even": 0 is not a placement', {"even": [0, 1]}, names=["even"])
    mine = [Replicate(), Shard(0)] if dist.get_rank() < 2 else [Shard(0), Replicate()]
    refuse(
        ValueError,
        r'"even": the placements are .*Replicate.* on rank 0 of the mesh and .* on rank 2',
        mine,
        names=["even"],
    )
    # All ranks raise if one fails.
    there = path if dist.get_rank() != 3 else f"{path}.missing"
    with pytest.raises(FileNotFoundError if dist.get_rank() == 3 else fst.RankError, match="missing"):
        fst.load_distributed(there, mesh, [Replicate(), Replicate()])


@on_ranks(8)
def test_meshes_with_some_ranks(path):
    """Loads onto meshes of some ranks in any order. Other ranks get empty DTensors, as from `distribute_tensor`."""
    rank = dist.get_rank()
    full = fst.load_file(path)
    for ranks_of_mesh in ([0, 2], [1, 3, 4], [[0, 3], [1, 5]], [[4], [6]]):
        mesh = DeviceMesh("cpu", ranks_of_mesh)
        layout = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
        everyone = torch.tensor(ranks_of_mesh).flatten().tolist()
        group = dist.new_group(everyone) if len(everyone) == 4 else None
        if rank in everyone:
            if group is not None:
                with pytest.raises(ValueError, match=r"no process group .* \[0, 1, 3, 5\]; call mesh._flatten"):
                    fst.load_distributed(path, mesh, layout)
            check_like_distribute_tensor(path, mesh, layout, group=group)
            continue
        loaded = fst.load_distributed(path, mesh, fitting(layout))
        assert list(loaded) == list(full)
        for name, actual in loaded.items():
            expected = distribute_tensor(full[name], mesh, fitting(layout)(name, full[name].shape))
            assert (actual.shape, actual.placements) == (expected.shape, expected.placements)
            assert (actual.to_local().numel(), actual.dtype) == (0, expected.dtype)
    # Collectives sort the ranks of a mesh, and so does `distribute_tensor` for even shards.
    mesh = DeviceMesh("cpu", [7, 2])
    loaded = fst.load_distributed(path, mesh, fitting([Shard(0)]))
    expected = distribute_tensor(full["even"], mesh, [Shard(0)])
    if rank in (2, 7):
        assert_same(loaded["even"].to_local(), expected.to_local())
    dist.barrier()


def check_dtypes(path):
    """Loads shards of several regions."""
    mesh = init_device_mesh("cpu", (2,))
    placement = _StridedShard(0, split_factor=2)
    loaded = fst.load_distributed(path, mesh, placement)
    for name, full in fst.load_file(path).items():
        # Some dtypes support no split, so the bytes are split.
        expected = split(full.view(torch.uint8), placement, 2)[mesh.get_local_rank()]
        assert_same(loaded[name].to_local().contiguous().view(torch.uint8), expected)


def test_dtypes(ranks, tmp_path):
    tensors = {f"{dtype} {shape}": random_raw(dtype, shape) for dtype in DTYPES for shape in [(8, 6), (5, 2)]}
    ranks(2).run(check_dtypes, write(tmp_path / "dtypes.safetensors", tensors))
