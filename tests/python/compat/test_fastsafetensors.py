"""Programs written for fastsafetensors run with their import changed, and its traps are gone."""

import gc
import logging
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fst
from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.common import is_gpu_found
from fst.compat.fastsafetensors.frameworks import TensorBase, get_framework_op
from fst.compat.fastsafetensors.st_types import Device, DeviceType, DType
from rawfile import DTYPES, assert_same, random_raw, write

SINGLE_RUN = """
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors", "b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0")
print(f"a0: {tensor_a0}")
loader.close()
"""

PARALLEL_RUN = """
import torch
import torch.distributed as dist
from fastsafetensors import SafeTensorsFileLoader
dist.init_process_group(backend="gloo")
dist.barrier()
pg = dist.group.WORLD
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(pg, device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors"], 1:["b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0") # broadcast
tensor_b0_sharded = fb.get_sharded(tensor_name="b0", dim=1) # partition and scatter
print(f"RANK {pg.rank()}: tensor_a0={tensor_a0}")
print(f"RANK {pg.rank()}: tensor_b0_sharded={tensor_b0_sharded}")
loader.close()
"""

LOADER_DOCSTRING = """
from fastsafetensors import SafeTensorsFileLoader
src_files = ["a.safetensors", "b.safetensors"]
loader = SafeTensorsFileLoader(None, "cpu", nogds=True, debug_log=True)
loader.add_filenames({0: src_files})
bufs = loader.copy_files_to_device()
print(bufs.get_tensor(loader.get_keys()[0]))
loader.close()
"""

PARALLEL_LOADER_DOCSTRING = """
from fastsafetensors import ParallelLoader
src_files = ["a.safetensors", "b.safetensors"]
iterator = ParallelLoader(None, src_files, max_concurrent_producers=1, queue_size=0)
for key, tensor in iterator.iterate_weights():
    print(f"Loaded tensor: {key}, shape: {tensor.shape}")
"""

FASTSAFE_OPEN = """
from fastsafetensors import fastsafe_open
with fastsafe_open(filenames=["a.safetensors"], nogds=True, device="cpu", debug_log=True) as f:
    for k in f.keys():
        t = f.get_tensor(k).clone().detach()
        print(f" k={k}, shape = {t.shape}")
"""

EXPERTS = """
from fastsafetensors import SafeTensorsFileLoader
from fastsafetensors.ep_slice import expert_parallel_filter
loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
loader.set_tensor_filter(expert_parallel_filter(num_experts=4, ep_size=2, ep_rank=1))
loader.add_filenames({0: ["experts.safetensors"]})
bufs = loader.copy_files_to_device()
print(loader.get_keys())
"""

AUTO = """
import contextlib
from fastsafetensors import AutoLoader
loader = AutoLoader(None, ["a.safetensors", "b.safetensors"], device="cpu")
with contextlib.closing(loader.iterate_weights()) as weights:
    for key, tensor in weights:
        print(key)
loader.close()
"""


def over_fst(program):
    """The program with its imports changed, and nothing else."""
    return program.replace("from fastsafetensors", "from fst.compat.fastsafetensors")


def run(program):
    variables = {"__name__": "example"}
    exec(compile(over_fst(program), "example", "exec"), variables)
    return variables


def rows(columns=8):
    """What the files of the examples hold: each row is its number."""
    return torch.arange(16, dtype=torch.float16)[:, None].expand(16, columns).contiguous()


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The examples name files where they run."""
    monkeypatch.chdir(tmp_path)
    save_file({"a0": rows()}, "a.safetensors", metadata={"format": "pt"})
    save_file({"b0": rows(), "b1": torch.arange(6).reshape(2, 3)}, "b.safetensors")
    names = [f"layers.0.experts.{expert}.weight" for expert in range(4)]
    save_file({name: torch.ones(2) for name in ["router", *names]}, "experts.safetensors")
    return tmp_path


def loaded(files=("a.safetensors", "b.safetensors"), **options):
    loader = compat.SafeTensorsFileLoader(compat.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    return loader.copy_files_to_device(**options)


class Ranks:
    """A process group of some size."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return 0


# The examples.


def test_single_run(capsys):
    tensor = run(SINGLE_RUN)["tensor_a0"]
    assert torch.equal(tensor.cpu(), rows())
    assert capsys.readouterr().out == f"a0: {tensor}\n"


@pytest.mark.gpu
def test_single_run_on_a_gpu():
    tensor = run(SINGLE_RUN)["tensor_a0"]
    assert tensor.device == torch.device("cuda:0")
    assert torch.equal(tensor.cpu(), rows())


def test_parallel_run_with_one_rank(run_python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    printed = run_python(over_fst(PARALLEL_RUN), CUDA_VISIBLE_DEVICES="", **ranks)
    assert printed == f"RANK 0: tensor_a0={rows()}\nRANK 0: tensor_b0_sharded={rows()}\n"


def test_docstring_of_the_loader(capsys):
    run(LOADER_DOCSTRING)
    assert capsys.readouterr().out == f"{rows()}\n"


def test_docstring_of_the_parallel_loader(capsys):
    run(PARALLEL_LOADER_DOCSTRING)
    assert capsys.readouterr().out.splitlines() == [
        f"Loaded tensor: {name}, shape: {shape}"
        for name, shape in [
            ("a0", torch.Size([16, 8])),
            *(
                (name, torch.Size(fst.load_file("b.safetensors")[name].shape))
                for name in fst.tensor_names("b.safetensors")
            ),
        ]
    ]


def test_fastsafe_open_example(capsys):
    run(FASTSAFE_OPEN)
    assert capsys.readouterr().out == " k=a0, shape = torch.Size([16, 8])\n"


def test_experts_example():
    assert run(EXPERTS)["loader"].get_keys() == [
        "layers.0.experts.2.weight",
        "layers.0.experts.3.weight",
        "router",
    ]


def test_auto_loader_example(capsys):
    run(AUTO)
    assert sorted(capsys.readouterr().out.split()) == ["a0", "b0", "b1"]


# The loader and its buffer.


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, tmp_path):
    raw = random_raw(dtype, (3, 4))
    write(tmp_path / "one.safetensors", {"x": raw})
    buffer = loaded(["one.safetensors"])
    assert_same(buffer.get_tensor("x"), raw.tensor())
    wrapped = buffer.get_tensor_wrapped("x")
    assert wrapped.dtype is DType(dtype)
    assert wrapped.get_shape() == buffer.get_shape("x") == [3, 4]
    assert wrapped.get_nbytes() == len(raw.data)


def test_tensors_stay_after_everything_is_closed(directory):
    with compat.SafeTensorsFileLoader(None, "cpu") as loader:
        loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
        buffer = loader.copy_files_to_device(borrowed_tensors=True)
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        buffer.close()
        buffer.close()
    for name in ("a.safetensors", "b.safetensors"):
        (directory / name).unlink()
    del buffer, loader
    gc.collect()
    assert torch.equal(tensors["a0"], rows())
    assert torch.equal(tensors["b0"], rows())
    assert torch.equal(tensors["b1"], torch.arange(6).reshape(2, 3))


def test_tensors_are_independent():
    buffer = loaded()
    buffer.get_tensor("b0").zero_()
    assert torch.equal(buffer.get_tensor("b1"), torch.arange(6).reshape(2, 3))
    assert torch.equal(loaded().get_tensor("b0"), rows())


def test_a_closed_buffer_says_so():
    buffer = loaded()
    buffer.close()
    with pytest.raises(RuntimeError, match=r'"a0" was asked for after close\(\)'):
        buffer.get_tensor("a0")
    assert buffer.get_shape("a0") == [16, 8]


def test_where_tensors_are():
    loader = compat.SafeTensorsFileLoader(None)
    loader.add_filenames({0: ["a.safetensors", "b.safetensors"], 1: [Path("experts.safetensors")]})
    buffer = loader.copy_files_to_device()
    assert buffer.get_filename("b1") == "b.safetensors"
    assert loader.get_shape("b1") == buffer.get_shape("b1") == [2, 3]
    assert buffer.key_to_rank_lidx["a0"] == (0, 0)
    assert buffer.key_to_rank_lidx["b0"] == (0, 1)
    assert buffer.key_to_rank_lidx["router"] == (1, 0)
    # The first file of each rank, then the second of each.
    assert list(loader.meta) == ["a.safetensors", "experts.safetensors", "b.safetensors"]


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_unknown_names(error):
    buffer = loaded()
    for get in (buffer.get_tensor, buffer.get_shape, buffer.get_filename):
        with pytest.raises(error, match='no file that was loaded holds "c0"'):
            get("c0")


def test_shards_of_one_rank_are_whole():
    buffer = loaded()
    for dim in (-1, 0, 1, -2):
        assert torch.equal(buffer.get_sharded("a0", dim), rows())
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f'"a0" has 2 dimensions and cannot be split along dimension {dim}'):
            buffer.get_sharded("a0", dim)
    assert torch.equal(buffer.push_tensor("a0", 0), rows())


def test_several_columns_in_the_order_of_their_names():
    buffer = loaded()
    joined = buffer.get_multi_cols(["b0", "a0"], dim=1, dtype=DType.F32)
    assert isinstance(joined, TensorBase)
    assert torch.equal(joined.get_raw(), torch.cat([rows(), rows()], 1).float())
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        buffer.get_multi_cols(["a0", "b1"], dim=1)


def test_as_dict():
    tensors = loaded().as_dict({"a0": -1, "b1": 0})
    assert list(tensors) == ["a0", "b1"]
    assert torch.equal(tensors["b1"].get_raw(), torch.arange(6).reshape(2, 3))


def test_local_tensors():
    assert [(name, tuple(tensor.shape)) for name, tensor in loaded().iter_local_tensors(["b1", "a0"])] == [
        ("b1", (2, 3)),
        ("a0", (16, 8)),
    ]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64, DType.I8, torch.float32])
def test_all_tensors_take_a_dtype(dtype):
    wanted = dtype if isinstance(dtype, torch.dtype) else TensorBase(torch.empty(0)).to(dtype=dtype).get_raw().dtype
    buffer = loaded(dtype=dtype)
    for name, tensor in {**load_file("a.safetensors"), **load_file("b.safetensors")}.items():
        assert_same(buffer.get_tensor(name), tensor.to(wanted))


def test_one_tensor_takes_device_and_dtype():
    buffer = loaded()
    tensor = buffer.get_tensor("b1", device=Device.from_str("cpu"), dtype=DType.F32)
    assert_same(tensor, torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert buffer.get_tensor("a0") is buffer.get_tensor("a0", device="cpu", dtype=DType.F16)


@pytest.mark.gpu
def test_devices():
    loader = compat.SafeTensorsFileLoader(None, Device(DeviceType.CUDA, 0))
    loader.add_filenames({0: ["a.safetensors"]})
    buffer = loader.copy_files_to_device()
    tensor = buffer.get_tensor("a0")
    assert tensor.device == torch.device("cuda:0")
    assert buffer.get_tensor("a0", device="cpu").device.type == "cpu"
    buffer.close()
    assert torch.equal(tensor.cpu(), rows())
    assert compat.get_device_numa_node(0) is None or compat.get_device_numa_node(0) >= 0


def test_a_filter_reads_nothing_else():
    loader = compat.SafeTensorsFileLoader(None)
    loader.set_tensor_filter(lambda name: name != "b0")
    loader.add_filenames({0: ["a.safetensors", "b.safetensors"]})
    with fst.profile() as profile:
        buffer = loader.copy_files_to_device()
    assert profile.summary().tensors == 2
    assert loader.get_keys() == list(buffer.key_to_rank_lidx) == ["a0", "b1"]
    with pytest.raises(ValueError, match='leaves out "b0"'):
        loader.get_shape("b0")
    with pytest.raises(ValueError, match="b0"):
        buffer.get_tensor("b0")
    loader.set_tensor_filter(None)
    assert "b0" in loader.get_keys()


def test_no_files():
    assert list(loaded([]).key_to_rank_lidx) == []
    assert list(compat.ParallelLoader(None, []).iterate_weights()) == []


def test_a_loader_can_be_used_again():
    loader = compat.SafeTensorsFileLoader(None)
    loader.add_filenames({0: ["a.safetensors"]})
    loader.copy_files_to_device()
    loader.reset()
    loader.add_filenames({0: ["b.safetensors"]})
    assert sorted(loader.copy_files_to_device().key_to_rank_lidx) == ["b0", "b1"]


def test_logs(caplog):
    with caplog.at_level(logging.DEBUG, logger="fst.compat.fastsafetensors"):
        loaded(["a.safetensors"])
    assert "rank 0 reads a.safetensors, which has 1 tensors" in caplog.text


# What is refused.


@pytest.mark.parametrize(
    "open_with",
    [
        lambda group: compat.SafeTensorsFileLoader(group, "cpu"),
        lambda group: compat.fastsafe_open("a.safetensors", pg=group),
        lambda group: compat.ParallelLoader(group, ["a.safetensors"]),
        lambda group: compat.AutoLoader(group, ["a.safetensors"]),
        lambda group: compat.PipelineParallel(group, compat.SafeTensorsFileLoader(None), ["a.safetensors"]),
    ],
)
def test_what_is_no_process_group_is_refused(open_with):
    for group in (-100, Ranks(2), "world"):
        with pytest.raises(TypeError, match=r"a process group of torch\.distributed"):
            open_with(group)
    open_with(Ranks(1))


def test_every_rank_may_load_for_itself():
    loader = compat.ParallelLoader(Ranks(8), ["a.safetensors"], all_local=True, use_tqdm_on_load=False)
    assert [name for name, _ in loader.iterate_weights()] == ["a0"]


def test_other_frameworks_are_refused():
    with pytest.raises(NotImplementedError, match='"paddle"'):
        compat.SafeTensorsFileLoader(None, framework="paddle")


def test_unknown_devices_are_refused():
    for device in ("npu", "cuda:x", "cuda:"):
        with pytest.raises(ValueError, match=f'"{device}" is no device'):
            compat.SafeTensorsFileLoader(None, device)


def test_misspelt_arguments_are_refused():
    with pytest.raises(TypeError, match="nogdz"):
        compat.SafeTensorsFileLoader(None, nogdz=True)
    with pytest.raises(TypeError, match="max_batch_byte"):
        compat.ParallelLoader(None, ["a.safetensors"], max_batch_byte=1)


def test_a_name_in_two_files_is_refused():
    save_file({"a0": torch.ones(1)}, "again.safetensors")
    with pytest.raises(fst.SafetensorError, match="a0"):
        loaded(["a.safetensors", "again.safetensors"])


def test_broken_files_are_refused_when_they_are_named():
    Path("cut.safetensors").write_bytes(Path("a.safetensors").read_bytes()[:-1])
    loader = compat.SafeTensorsFileLoader(None)
    with pytest.raises(fst.SafetensorError, match=r"cut\.safetensors"):
        loader.add_filenames({0: ["cut.safetensors"]})
    with pytest.raises(FileNotFoundError):
        loader.add_filenames({0: ["none.safetensors"]})
    with pytest.raises(IsADirectoryError, match="named one by one"):
        loader.add_filenames({0: ["."]})


# Files as `safe_open` has them.


@pytest.mark.parametrize(
    "filenames",
    ["a.safetensors", Path("a.safetensors"), ["a.safetensors"], ("a.safetensors",), {0: ["a.safetensors"]}],
)
def test_ways_to_name_files(filenames):
    with compat.fastsafe_open(filenames) as file:
        assert file.keys() == ["a0"]
        assert file.metadata() == {"a.safetensors": {"format": "pt"}}
        tensor = file.get_tensor("a0")
        assert file.get_tensor_wrapped("a0").get_raw() is tensor
    assert torch.equal(tensor, rows())


# One by one.


def test_iteration_gives_tensors_that_stay():
    weights = dict(compat.ParallelLoader(None, ["a.safetensors", "b.safetensors"]).iterate_weights())
    assert torch.equal(weights["a0"], rows())
    assert torch.equal(weights["b0"], rows())


def test_iteration_again():
    loader = compat.ParallelLoader(None, ["a.safetensors"], use_tqdm_on_load=False)
    assert len(list(loader.iterate_weights())) == len(list(loader.iterate_weights())) == 1
    loader.close()


def test_iteration_with_a_filter():
    loader = compat.ParallelLoader(None, ["a.safetensors", "b.safetensors"], tensor_filter=lambda name: name > "b")
    assert sorted(name for name, _ in loader.iterate_weights()) == ["b0", "b1"]


@pytest.fixture
def streams(monkeypatch):
    """The streams that were opened, with their arguments."""
    opened = []
    real = fst.stream

    def stream(*arguments, **options):
        opened.append((real(*arguments, **options), options))
        return opened[-1][0]

    monkeypatch.setattr(fst, "stream", stream)
    return opened


def test_leaving_the_loop_ends_the_load(streams):
    weights = compat.ParallelLoader(None, ["b.safetensors"]).iterate_weights()
    next(weights)
    weights.close()
    [(stream, _)] = streams
    assert list(stream) == []


A0, B0, B1 = 256, 256, 48


@pytest.mark.parametrize(
    ("options", "window_bytes"),
    [
        ({}, 512 << 20),
        ({"max_batch_bytes": 1000}, 1000),
        ({"device_memory_budget": A0 + B0 + B1}, 512 << 20),
        ({"device_memory_budget": 1000, "accumulate_resident": False}, 1000 - A0),
        ({"device_memory_budget": 1000, "resident_tensor": lambda name: name != "b1"}, 1000 - A0 - B0 - B1),
        ({"device_memory_budget": 1000, "accumulate_resident": False, "max_batch_bytes": 500}, 500),
    ],
)
def test_how_far_the_load_is_ahead(streams, options, window_bytes):
    loader = compat.ParallelLoader(None, ["a.safetensors", "b.safetensors"], use_tqdm_on_load=False, **options)
    assert len(list(loader.iterate_weights())) == 3
    assert streams[0][1]["window_bytes"] == window_bytes


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, A0 + B0 + B1),
        ({"accumulate_resident": False}, 2 * A0),
        ({"resident_tensor": lambda name: name != "b1"}, A0 + B0 + 2 * B1),
    ],
)
def test_budgets_that_are_too_little(options, needed):
    files = ["a.safetensors", "b.safetensors"]
    compat.ParallelLoader(None, files, device_memory_budget=needed, **options)
    with pytest.raises(compat.BudgetInfeasibleError, match=f"is {needed - 1} bytes, but {needed} are needed"):
        compat.ParallelLoader(None, files, device_memory_budget=needed - 1, **options)


def test_residents_without_accumulation_are_refused():
    with pytest.raises(ValueError, match="resident_tensor"):
        compat.ParallelLoader(None, [], accumulate_resident=False, resident_tensor=lambda _: True)


def test_bar(capsys):
    pytest.importorskip("tqdm")
    for shown in (True, False):
        loader = compat.ParallelLoader(None, ["a.safetensors"], use_tqdm_on_load=shown)
        list(loader.iterate_weights())
        assert ("100%" in capsys.readouterr().err) is shown


# Headers and helpers.


def test_metadata():
    metadata = compat.SafeTensorsMetadata.from_file("b.safetensors", get_framework_op("pytorch"))
    content = Path("b.safetensors").read_bytes()
    assert metadata.size_bytes == len(content)
    assert metadata.header_length == 8 + int.from_bytes(content[:8], "little")
    assert metadata.metadata == {}
    frame = metadata.tensors["b1"]
    assert (frame.dtype, frame.shape, frame.strides) == (DType.I64, [2, 3], [3, 1])
    begin, end = (metadata.header_length + offset for offset in frame.data_offsets)
    assert content[begin:end] == torch.arange(6).numpy().tobytes()
    assert metadata.select_byte_ranges(lambda name: name == "b1") == [(begin, end)]
    assert metadata.select_byte_ranges(lambda _: True) == [(metadata.header_length, len(content))]
    assert metadata.select_byte_ranges(lambda _: False) == []


def test_gaps_between_ranges():
    save_file({name: torch.zeros(1) for name in "abcd"}, "gaps.safetensors")
    metadata = compat.SafeTensorsMetadata.from_file("gaps.safetensors")
    first = metadata.header_length
    assert metadata.select_byte_ranges(lambda name: name in "acd", 3) == [(first, first + 4), (first + 8, first + 16)]
    assert metadata.select_byte_ranges(lambda name: name in "acd", 4) == [(first, first + 16)]


@given(st.integers(0, 300), st.integers(1, 40))
def test_every_expert_has_one_rank(experts, ranks):
    owned = [range(*compat.owned_expert_range(experts, ranks, rank)) for rank in range(ranks)]
    assert [expert for run in owned for expert in run] == list(range(experts))
    counts = [len(run) for run in owned]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_of_experts_that_are_none(size, rank):
    with pytest.raises(ValueError, match=r"ep_(size|rank) must be"):
        compat.owned_expert_range(4, size, rank)


def test_devices_by_name():
    assert Device.from_str("cuda:1") == Device(DeviceType.CUDA, 1)
    assert Device(DeviceType.CUDA, 1).as_str() == "cuda:1"
    assert Device.from_str("CPU") == Device()
    assert compat.SafeTensorsFileLoader(None, torch.device("cuda")).device == Device(DeviceType.CUDA)
    assert compat.SafeTensorsFileLoader(None, 3).device == Device(DeviceType.CUDA, 3)


def test_wrapped_tensors():
    wrapped = TensorBase(torch.arange(6.0).reshape(2, 3))
    assert wrapped.to().get_raw() is wrapped.get_raw()
    assert wrapped.view(DType.AUTO) is wrapped
    assert wrapped.view(DType.I32).get_raw().dtype == torch.int32
    assert wrapped.reshape([3, 2]).get_shape() == [3, 2]
    assert wrapped[1].get_raw().tolist() == [3.0, 4.0, 5.0]
    assert wrapped.clone().data_ptr() != wrapped.data_ptr() == wrapped.detach().data_ptr()
    assert TensorBase(wrapped.get_raw().T).contiguous().get_raw().is_contiguous()
    assert wrapped.device == Device()
    with pytest.raises(NotImplementedError, match="F6_E2M3"):
        wrapped.to(dtype=DType.F6_E2M3)
    with pytest.raises(TypeError, match="dtype must be"):
        wrapped.to(dtype="F16")


def test_nothing_is_held_beside_tensors():
    buffer = loaded()
    assert compat.live_allocation_count() == compat.live_allocation_bytes() == 0
    buffer.close()


def test_numa_node_of_no_gpu():
    assert compat.get_device_numa_node(None) is None
    assert is_gpu_found() == torch.cuda.is_available()


def test_debug_shows_logs(run_python):
    program = "from fst.compat.fastsafetensors.common import set_debug; import logging; set_debug(); "
    program += "import sys; sys.stderr = sys.stdout; set_debug(); logging.getLogger('x').debug('seen')"
    assert run_python(program) == "[DEBUG] seen\n"


# Against the real one.


@pytest.fixture
def real():
    return pytest.importorskip("fastsafetensors")


def files_of_both():
    return {0: ["b.safetensors", "a.safetensors"]}


def test_same_tensors_as_the_real_one(real, tmp_path):
    from fastsafetensors.st_types import DType as RealDType

    known = {dtype.value for dtype in RealDType}
    write(tmp_path / "all.safetensors", {dtype: random_raw(dtype, (5, 6)) for dtype in DTYPES if dtype in known})
    buffers = []
    for package in (compat, real):
        loader = package.SafeTensorsFileLoader(package.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: ["all.safetensors", "a.safetensors"]})
        assert loader.get_keys()
        buffers.append((loader, loader.copy_files_to_device()))
    (ours, our_buffer), (theirs, their_buffer) = buffers
    assert sorted(ours.get_keys()) == sorted(theirs.get_keys())
    assert our_buffer.key_to_rank_lidx.keys() == their_buffer.key_to_rank_lidx.keys()
    for name in theirs.get_keys():
        assert_same(our_buffer.get_tensor(name), their_buffer.get_tensor(name))
        assert_same(our_buffer.get_sharded(name, 1), their_buffer.get_sharded(name, 1))
        assert_same(our_buffer.push_tensor(name, 0), their_buffer.push_tensor(name, 0))
        assert our_buffer.get_shape(name) == their_buffer.get_shape(name) == ours.get_shape(name)
        assert our_buffer.get_filename(name) == their_buffer.get_filename(name)
        wrapped, other = our_buffer.get_tensor_wrapped(name), their_buffer.get_tensor_wrapped(name)
        assert (wrapped.get_shape(), wrapped.dtype.value) == (other.get_shape(), other.dtype.value)


def test_same_conversions_as_the_real_one(real):
    from fastsafetensors.st_types import DType as RealDType

    save_file({"f": torch.randn(4, 5), "i": torch.arange(8), "h": torch.randn(3).half()}, "mixed.safetensors")
    for name in ("F16", "BF16"):
        results = []
        for package, dtype in ((compat, DType(name)), (real, RealDType(name))):
            loader = package.SafeTensorsFileLoader(None, "cpu", nogds=True)
            loader.add_filenames({0: ["mixed.safetensors"]})
            results.append(loader.copy_files_to_device(dtype=dtype))
        for key in ("f", "i", "h"):
            assert_same(*(buffer.get_tensor(key) for buffer in results))


def test_same_iteration_as_the_real_one(real):
    order = files_of_both()[0]
    ours = list(compat.ParallelLoader(None, order, use_tqdm_on_load=False).iterate_weights())
    theirs = list(real.ParallelLoader(None, order, use_tqdm_on_load=False, nogds=True).iterate_weights())
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (_, tensor), (_, other) in zip(ours, theirs, strict=True):
        assert_same(tensor, other)


def test_same_columns_as_the_real_one(real):
    results = []
    for package in (compat, real):
        with package.fastsafe_open("b.safetensors", nogds=True) as file:
            results.append(file.fb.get_multi_cols(["b0", "b0"], 1).get_raw().clone())
    assert_same(*results)


def test_same_headers_as_the_real_one(real):
    from fastsafetensors.frameworks import get_framework_op as real_framework

    for path in ("a.safetensors", "b.safetensors", "experts.safetensors"):
        ours = compat.SafeTensorsMetadata.from_file(path, get_framework_op("pt"))
        theirs = real.SafeTensorsMetadata.from_file(path, real_framework("pt"))
        assert (ours.header_length, ours.size_bytes) == (theirs.header_length, theirs.size_bytes)
        assert ours.metadata == (theirs.metadata or {})
        for name, frame in theirs.tensors.items():
            own = ours.tensors[name]
            assert (own.dtype.value, own.shape, own.data_offsets) == (
                frame.dtype.value,
                frame.shape,
                frame.data_offsets,
            )
            assert own.strides == frame.strides
        for gap in (0, 8, 4096):
            assert ours.select_byte_ranges(lambda name: "1" not in name, gap) == theirs.select_byte_ranges(
                lambda name: "1" not in name, gap
            )


def test_every_public_name_of_the_real_one_is_there_or_explained(real):
    names = {name for name, value in vars(real).items() if not name.startswith("_") and isinstance(value, type)}
    explained = {"LoaderConfig", "ParallelSaver"}
    assert names - set(compat.__all__) == explained
