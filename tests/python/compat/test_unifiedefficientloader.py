"""Programs written for unifiedefficientloader run with their import changed, and its traps are gone."""

import gc
import io
import logging
import math
import pickle
import threading
from contextlib import redirect_stdout

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

import fst
from fst.compat import unifiedefficientloader as uel
from rawfile import DTYPES, assert_same, random_raw, write

needs_gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The examples name files where they run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tensors():
    """What `model.safetensors` holds; a dictionary among it."""
    torch.manual_seed(0)
    weights = {f"layer.{index}.weight": torch.randn(index % 5 + 1, 7) for index in range(20)}
    weights |= {
        "weight_name": torch.randn(3, 4),
        "config": uel.dict_to_tensor({"heads": 4}),
        "empty": torch.empty(0, 3),
    }
    save_file(weights, "model.safetensors", metadata={"format": "pt"})
    return weights


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=0, atol=0)


# The examples of its pages, 0.2.2 and 0.4.1.


def test_example_standard_mode(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    with UnifiedSafetensorsLoader("model.safetensors", low_memory=False) as loader:
        tensor = loader.get_tensor("weight_name")

    torch.testing.assert_close(tensor, tensors["weight_name"], rtol=0, atol=0)


def test_example_low_memory_mode(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        for key in loader.keys():  # noqa: SIM118
            tensor = loader.get_tensor(key)
            found[key] = tensor
            loader.mark_processed(key)
    assert_equal(found, tensors)


def test_example_header_analysis(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader, tensor_to_dict

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        uint8_tensor_keys = [
            key for key, info in loader._header.items() if isinstance(info, dict) and info.get("dtype") == "U8"
        ]
        for key in uint8_tensor_keys:
            loaded_tensor = loader.get_tensor(key)
            found[key] = tensor_to_dict(loaded_tensor)
    assert found == {"config": {"heads": 4}}


def example_asynchronous_streaming():
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader, transfer_to_gpu_pinned

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        keys_to_load = loader.keys()
        stream = loader.async_stream(keys_to_load, batch_size=8, prefetch_batches=2, pin_memory=True)
        for batch in stream:
            for key, pinned_tensor in batch:
                assert pinned_tensor.numel() == 0 or pinned_tensor.is_pinned() == torch.cuda.is_available()
                gpu_tensor = transfer_to_gpu_pinned(pinned_tensor, device="cuda")
                found[key] = gpu_tensor
                loader.mark_processed(key)
    return found


def test_example_asynchronous_streaming(tensors):
    assert_equal(example_asynchronous_streaming(), tensors)


@needs_gpu
def test_example_asynchronous_streaming_to_a_gpu(tensors):
    found = example_asynchronous_streaming()
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert_equal(found, tensors)


def test_example_conversion():
    from fst.compat.unifiedefficientloader import dict_to_tensor, tensor_to_dict

    my_dict = {"param": 1.0, "name": "test"}
    tensor = dict_to_tensor(my_dict)
    recovered_dict = tensor_to_dict(tensor)

    assert tensor.dtype == torch.uint8
    assert recovered_dict == my_dict


def example_pinned_transfer():
    from fst.compat.unifiedefficientloader import transfer_to_gpu_pinned

    tensor = torch.randn(100, 100)
    gpu_tensor = transfer_to_gpu_pinned(tensor, device="cuda:0")

    return tensor, gpu_tensor


def test_example_pinned_transfer():
    tensor, moved = example_pinned_transfer()
    torch.testing.assert_close(moved.cpu(), tensor, rtol=0, atol=0)


@needs_gpu
def test_example_pinned_transfer_to_a_gpu():
    uel.reset_pinned_transfer_stats()
    tensor, moved = example_pinned_transfer()
    assert moved.device == torch.device("cuda:0")
    torch.testing.assert_close(moved.cpu(), tensor, rtol=0, atol=0)
    assert uel.get_pinned_transfer_stats() == {"pinned": 1, "fallback": 0}


def example_writer(device):
    from fst.compat.unifiedefficientloader import IncrementalSafetensorsWriter, UnifiedSafetensorsLoader

    def custom_quantize(tensor):
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    loader = UnifiedSafetensorsLoader("source_model.safetensors", low_memory=True)
    writer = IncrementalSafetensorsWriter("merged_or_quantized.safetensors", metadata=loader.metadata())
    with writer:
        for key in loader.keys():  # noqa: SIM118
            t = loader.get_tensor(key)
            gpu_t = t.to(device)
            del t
            out_gpu_t = custom_quantize(gpu_t)
            out_t = out_gpu_t.cpu()
            del gpu_t, out_gpu_t
            writer.write(key, out_t)
            del out_t


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_example_writer(tensors, device):
    save_file(tensors, "source_model.safetensors", metadata={"format": "pt"})
    example_writer(device)
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    assert_equal(load_file("merged_or_quantized.safetensors"), expected)
    assert fst.metadata("merged_or_quantized.safetensors") == {"format": "pt"}


def example_data_loader(dataset):
    from fst.compat.unifiedefficientloader import UnifiedDataLoader

    loader = UnifiedDataLoader(dataset, batch_size=32, shuffle=True, num_workers=4, direct_gpu=True)
    return list(loader)


class Pictures(Dataset):
    """Pictures and their labels; each picture holds its number."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


def assert_pictures(batches, device_type):
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    assert {batch.device.type for pair in batches for batch in pair} == {device_type}
    for pictures, labels in batches:
        assert torch.equal(pictures[:, 0, 0, 0].long(), labels)
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(100))


def test_example_data_loader():
    assert_pictures(example_data_loader(Pictures()), "cuda" if torch.cuda.is_available() else "cpu")


@needs_gpu
def test_example_data_loader_on_a_gpu():
    assert_pictures(example_data_loader(Pictures()), "cuda")


def test_example_data_loader_with_torchvision():
    torchvision = pytest.importorskip("torchvision")
    dataset = torchvision.datasets.FakeData(size=40, image_size=(3, 8, 8), transform=torchvision.transforms.ToTensor())
    assert [pictures.shape[0] for pictures, _ in example_data_loader(dataset)] == [32, 8]


def example_direct_to_gpu():
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    found = {}
    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, direct_gpu=True) as loader:
        stream = loader.async_stream(loader.keys(), batch_size=8, prefetch_batches=2)
        for batch in stream:
            for key, gpu_tensor in batch:
                found[key] = gpu_tensor
                loader.mark_processed(key)
    return found


def test_example_direct_to_gpu(tensors):
    assert_equal(example_direct_to_gpu(), tensors)


@needs_gpu
def test_example_direct_to_gpu_on_a_gpu(tensors):
    found = example_direct_to_gpu()
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert_equal(found, tensors)


def test_example_mmap(tensors):
    from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader

    with UnifiedSafetensorsLoader("model.safetensors", low_memory=True, use_mmap=True) as loader:
        state_dict = loader.load_all()
    assert_equal(state_dict, tensors)


# What its classes have.


@pytest.mark.usefixtures("tensors")
def test_old_name():
    assert uel.MemoryEfficientSafeOpen is uel.UnifiedSafetensorsLoader


@pytest.mark.parametrize("low_memory", [False, True])
def test_every_dtype(tmp_path, low_memory):
    raws = {name: random_raw(name, (3, 4, 2)) for name in DTYPES}
    path = write(tmp_path / "dtypes.safetensors", raws)
    with uel.UnifiedSafetensorsLoader(path, low_memory=low_memory) as loader:
        for name, raw in raws.items():
            expected = raw.tensor()
            assert_same(loader.get_tensor(name), expected)
            assert loader.get_shape(name) == tuple(expected.shape)
            assert loader.get_ndim(name) == 3
            assert loader.get_dtype(name) == expected.dtype
            assert uel.st_to_torch_dtype(name) == expected.dtype
            assert uel.torch_to_st_dtype(expected.dtype) == name
        assert {name: tensor.dtype for name, tensor in loader.load_all().items()} == {
            name: raw.torch_dtype for name, raw in raws.items()
        }


@pytest.mark.parametrize("low_memory", [False, True])
def test_header(tensors, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        assert loader._header.pop("__metadata__") == loader.metadata() == {"format": "pt"}
        data_bytes = 0
        for name, entry in loader._header.items():
            begin, end = entry["data_offsets"]
            assert begin == data_bytes
            assert end - begin == tensors[name].nbytes
            assert entry["shape"] == list(tensors[name].shape)
            data_bytes = end
        assert loader.keys() == list(loader._header)


@pytest.mark.parametrize("low_memory", [False, True])
def test_unknown_names(tensors, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        for ask in (loader.get_tensor, loader.get_shape, loader.get_dtype, lambda key: loader.async_stream([key])):
            for name in ("missing", "__metadata__"):
                with pytest.raises(KeyError, match=name):
                    ask(name)
        loader.mark_processed("missing")


def test_kept_tensors_are_the_same_until_processed(tensors):
    with uel.UnifiedSafetensorsLoader("model.safetensors") as loader:
        first = loader.get_tensor("weight_name")
        assert loader.get_tensor("weight_name") is first
        loader.mark_processed("weight_name")
        again = loader.get_tensor("weight_name")
        assert again.data_ptr() != first.data_ptr()
        assert_equal(loader.load_all(), tensors)


@given(
    st.lists(st.integers(0, 22), max_size=40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0, 200, 1 << 20]),
)
def test_batches_come_in_the_order_asked_for(tmp_path_factory, order, batch_size, prefetch_batches, window_bytes):
    """In any order, with any name several times, whatever fits into the window."""
    path = tmp_path_factory.mktemp("order") / "m.safetensors"
    expected = {f"t{index}": torch.full((index, 3), float(index)) for index in range(23)}
    save_file(expected, path)
    keys = [f"t{index}" for index in order]
    with pytest.MonkeyPatch.context() as patch, uel.UnifiedSafetensorsLoader(path, low_memory=True) as loader:
        module = "fst.compat.unifiedefficientloader.memory_efficient_loader"
        patch.setattr(f"{module}._WINDOW_BYTES_MIN", 1)
        patch.setattr(f"{module}._WINDOW_BYTES_MAX", max(window_bytes, 1))
        batches = list(loader.async_stream(keys, batch_size, prefetch_batches))
    assert [key for batch in batches for key, _ in batch] == keys
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (math.ceil(len(keys) / batch_size) - 1)
    for batch in batches:
        assert_equal(dict(batch), {key: expected[key] for key, _ in batch})


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"prefetch_batches": 0}])
@pytest.mark.usefixtures("tensors")
def test_streams_of_nothing_are_refused(arguments):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        pytest.raises(ValueError, match="must be 1 or more"),
    ):
        loader.async_stream(loader.keys(), **arguments)


def test_a_stream_is_not_far_ahead(tmp_path, monkeypatch):
    """What is read before it is used stays within the window that the batches ask for."""
    monkeypatch.setenv("FST_READER", "pread")
    module = "fst.compat.unifiedefficientloader.memory_efficient_loader"
    monkeypatch.setattr(f"{module}._WINDOW_BYTES_MIN", 1)
    windows = []
    stream = fst.stream
    monkeypatch.setattr(fst, "stream", lambda *args, **kwargs: windows.append(kwargs) or stream(*args, **kwargs))
    save_file({f"t{index}": torch.zeros(1000) for index in range(40)}, tmp_path / "m.safetensors")
    with uel.UnifiedSafetensorsLoader(tmp_path / "m.safetensors", low_memory=True) as loader:
        for _ in loader.async_stream(loader.keys(), batch_size=3, prefetch_batches=2):
            pass
    assert windows == [{"window_bytes": 6 * 4000}]


def test_leaving_a_stream_ends_it(tensors):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader:
        stream = loader.async_stream(loader.keys(), batch_size=2)
        next(stream)
        stream.close()
        assert_equal(dict(pair for batch in loader.async_stream(loader.keys()) for pair in batch), tensors)


class Stored(Dataset):
    """A data set that reads its items with a loader that was opened before its workers began."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.loader.get_tensor(f"layer.{index}.weight").sum()


@pytest.mark.parametrize(("method", "low_memory"), [("fork", False), ("fork", True), ("spawn", True)])
def test_loaders_go_to_other_processes(tensors, method, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        data = DataLoader(Stored(loader), num_workers=1, multiprocessing_context=method)
        sums = torch.cat(list(data))
        assert_equal(pickle.loads(pickle.dumps(loader)).load_all(), tensors)
    expected = torch.stack([tensors[f"layer.{index}.weight"].sum() for index in range(20)])
    torch.testing.assert_close(sums, expected)


# Its traps.


@pytest.mark.parametrize("low_memory", [False, True])
def test_tensors_outlive_their_loader(tensors, low_memory):
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory) as loader:
        streamed = dict(pair for batch in loader.async_stream(loader.keys(), batch_size=4) for pair in batch)
        kept = loader.load_all()
        for key in loader.keys():  # noqa: SIM118
            loader.mark_processed(key)
    del loader
    gc.collect()
    save_file({"other": torch.ones(1000)}, "model.safetensors")
    assert_equal(streamed, tensors)
    assert_equal(kept, tensors)


@pytest.mark.usefixtures("tensors")
def test_cut_off_files_are_refused():
    with open("model.safetensors", "rb") as file:
        whole = file.read()
    with open("model.safetensors", "wb") as file:
        file.write(whole[:-1])
    for low_memory in (False, True):
        with pytest.raises(fst.SafetensorError):
            uel.UnifiedSafetensorsLoader("model.safetensors", low_memory)


@needs_gpu
def test_gpu_tensors_are_not_used_again(tensors):
    """Without `mark_processed`, and with it."""
    with uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True, direct_gpu=True) as loader:
        for mark in (lambda key: None, loader.mark_processed):
            found = {}
            for batch in loader.async_stream(loader.keys(), batch_size=1, prefetch_batches=1):
                for key, tensor in batch:
                    found[key] = tensor
                    mark(key)
            assert_equal(found, tensors)


def test_without_a_gpu_direct_gpu_says_so(tensors, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        loader = uel.UnifiedSafetensorsLoader("model.safetensors", direct_gpu=True)
        uel.UnifiedDataLoader(Pictures(), direct_gpu=True)
        uel.transfer_to_gpu_pinned(torch.zeros(1))
    assert loader.low_memory
    assert {tensor.device.type for tensor in loader.load_all().values()} == {"cpu"}
    assert len(caplog.records) == 3
    assert all("no GPU" in record.message for record in caplog.records)


def test_transfers_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    uel.reset_pinned_transfer_stats()
    tensor = uel.transfer_to_gpu_pinned(torch.ones(3), dtype=torch.float16)
    assert tensor.dtype == torch.float16
    assert uel.get_pinned_transfer_stats() == {"pinned": 0, "fallback": 1}
    assert uel.transfer_to_gpu_pinned(torch.ones(3), "cpu").device.type == "cpu"
    assert uel.get_pinned_transfer_stats()["fallback"] == 1
    uel.reset_pinned_transfer_stats()
    assert uel.get_pinned_transfer_stats() == {"pinned": 0, "fallback": 0}


@needs_gpu
def test_the_source_of_a_transfer_may_be_overwritten():
    for source in (torch.zeros(1 << 24), torch.zeros(1 << 24).pin_memory()):
        moved = uel.transfer_to_gpu_pinned(source)
        source.fill_(1)
        assert moved.sum().item() == 0


# The writer.


def test_writes_batches_and_dictionaries(tensors):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        uel.IncrementalSafetensorsWriter("sub/directory/copy.safetensors", max_workers=1) as writer,
    ):
        keys = loader.keys()
        for batch in loader.async_stream(keys[:10], batch_size=4):
            writer.write_batch(batch)
        writer.write_dict({key: loader.get_tensor(key) for key in keys[10:]})
    assert_equal(load_file("sub/directory/copy.safetensors"), tensors)


def test_headers_of_any_size_have_room():
    with uel.IncrementalSafetensorsWriter("m.safetensors", max_header_bytes=8) as writer:
        writer.write("w", torch.ones(3))
    assert_equal(load_file("m.safetensors"), {"w": torch.ones(3)})


def test_a_file_can_be_written_over_itself(tensors):
    with (
        uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as loader,
        uel.IncrementalSafetensorsWriter("model.safetensors") as writer,
    ):
        for key in loader.keys():  # noqa: SIM118
            writer.write(key, loader.get_tensor(key))
    assert_equal(load_file("model.safetensors"), tensors)


def test_tensors_may_change_once_they_are_written():
    tensor = torch.zeros(1 << 16)
    with uel.IncrementalSafetensorsWriter("m.safetensors") as writer:
        for index in range(4):
            tensor.fill_(index)
            writer.write(f"t{index}", tensor)
    assert_equal(load_file("m.safetensors"), {f"t{index}": torch.full((1 << 16,), float(index)) for index in range(4)})


def test_a_failure_leaves_the_old_file(tensors, tmp_path):
    before = sorted(tmp_path.iterdir())

    def fail():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            raise ZeroDivisionError

    def write_twice():
        with uel.IncrementalSafetensorsWriter("model.safetensors") as writer:
            writer.write("w", torch.ones(3))
            writer.write("w", torch.ones(3))

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ValueError, match="w"):
        write_twice()
    assert sorted(tmp_path.iterdir()) == before
    assert_equal(load_file("model.safetensors"), tensors)


def test_writing_needs_its_block():
    writer = uel.IncrementalSafetensorsWriter("m.safetensors")
    with pytest.raises(RuntimeError, match="block"):
        writer.write("w", torch.ones(3))
    with writer:
        writer.write("w", torch.ones(3))
    with pytest.raises(RuntimeError, match="block"):
        writer.write("v", torch.ones(3))


# The rest.


def test_what_is_no_dictionary():
    for tensor in (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2)):
        with pytest.raises(ValueError, match="1D tensor of uint8"):
            uel.tensor_to_dict(tensor)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
def test_any_dictionary_comes_back(value):
    assert uel.tensor_to_dict(uel.dict_to_tensor(value)) == value


def test_dtypes_without_a_name():
    with pytest.raises(ValueError, match="complex128"):
        uel.torch_to_st_dtype(torch.complex128)
    with pytest.raises(ValueError, match="F6_E2M3"):
        uel.st_to_torch_dtype("F6_E2M3")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_pytorch(num_workers, drop_last):
    ours = uel.UnifiedDataLoader(
        Pictures(), batch_size=7, num_workers=num_workers, prefetch_batches=3, pin_memory=True, drop_last=drop_last
    )
    expected = list(DataLoader(Pictures(), batch_size=7, drop_last=drop_last))
    assert len(ours) == len(expected)
    for _ in range(2):
        for found, batch in zip(ours, expected, strict=True):
            torch.testing.assert_close(found, batch)


class Broken(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise LookupError(f"no item {index}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_the_data_set_come_out(num_workers):
    with pytest.raises(LookupError, match="no item 0"):
        next(iter(uel.UnifiedDataLoader(Broken(), num_workers=num_workers)))


@needs_gpu
def test_gpu_batches_are_ready_and_stay():
    loader = uel.UnifiedDataLoader(Pictures(), batch_size=8, direct_gpu=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            kept = list(loader)
            torch.cuda.synchronize()
        assert torch.cat([pictures[:, 0, 0, 0] for pictures, _ in kept]).tolist() == list(range(100))


@pytest.mark.parametrize("make", [uel.PinnedBufferPool, lambda *sizes: uel.GpuBufferPool(*sizes, device="cpu")])
def test_pools_lend_each_buffer_once(make):
    pool = make(100, 2)
    (first, one), (second, other) = pool.acquire(), pool.acquire()
    assert one.shape == other.shape == (100,)
    assert first != second
    waiting = threading.Thread(target=pool.acquire)
    waiting.start()
    assert waiting.is_alive()
    pool.release(first)
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    pool.release(second)
    with pytest.raises(ValueError, match="not lent"):
        pool.release(second)


def test_logs_say_what_was_asked_for():
    program_handler = logging.NullHandler()
    logger = logging.getLogger("unifiedefficientloader")
    logger.addHandler(program_handler)
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            for _ in range(2):
                assert uel.setup_logging("VERBOSE") is logger
            for say in (uel.debug, uel.verbose, uel.normal, uel.info, uel.minimal, uel.warning, uel.error):
                say("%s words", "some")
        assert output.getvalue().splitlines() == [
            "[VERBOSE] some words",
            "some words",
            "some words",
            "[WARNING] some words",
            "[WARNING] some words",
            "[ERROR] some words",
        ]
        assert program_handler in logger.handlers
        assert logging.getLevelName(logging.WARNING) == "WARNING"
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


# Against the real one, where it can be imported.


@pytest.fixture
def original():
    library = pytest.importorskip("unifiedefficientloader")
    if not hasattr(library, "IncrementalSafetensorsWriter"):
        pytest.skip("needs release 0.4 or newer")
    return library


def test_it_has_the_names_of_the_original(original):
    assert set(uel.__all__) >= set(original.__all__)


def test_it_reads_what_the_original_reads(original, tensors):
    theirs = original.UnifiedSafetensorsLoader("model.safetensors", low_memory=True)
    with theirs, uel.UnifiedSafetensorsLoader("model.safetensors", low_memory=True) as ours:
        assert ours._header == theirs._header
        assert ours.metadata() == theirs.metadata()
        for key in theirs.keys():  # noqa: SIM118
            assert ours.get_shape(key) == theirs.get_shape(key)
            assert ours.get_dtype(key) == theirs.get_dtype(key)
            torch.testing.assert_close(ours.get_tensor(key), theirs.get_tensor(key), rtol=0, atol=0)
        keys = list(theirs.keys())
        for found, expected in zip(
            ours.async_stream(keys, batch_size=3), theirs.async_stream(keys, batch_size=3), strict=True
        ):
            assert [key for key, _ in found] == [key for key, _ in expected]
            torch.testing.assert_close([t for _, t in found], [t for _, t in expected], rtol=0, atol=0)


def test_it_writes_what_the_original_writes(original, tensors):
    for library in (original, uel):
        with library.IncrementalSafetensorsWriter(f"{library.__name__}.safetensors", metadata={"a": "b"}) as writer:
            for name, tensor in tensors.items():
                if tensor.numel():
                    writer.write(name, tensor)
    assert_equal(load_file(f"{uel.__name__}.safetensors"), load_file(f"{original.__name__}.safetensors"))
    assert fst.metadata(f"{uel.__name__}.safetensors") == {"a": "b"}


def test_it_converts_as_the_original_does(original):
    value = {"a": [1, "ü", None]}
    assert torch.equal(uel.dict_to_tensor(value), original.dict_to_tensor(value))
