"""`UnifiedDataLoader`, buffer pools, dictionaries and logs of `fst.compat.unifiedefficientloader`."""

import io
import logging
import threading
from contextlib import redirect_stdout

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from fst.compat import unifiedefficientloader as uel


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
def test_round_trip_of_dictionaries(value):
    tensor = uel.dict_to_tensor(value)
    assert uel.tensor_to_dict(tensor) == uel.tensor_to_dict(tensor.numpy()) == value


def test_invalid_encoded_dictionaries():
    array = uel.dict_to_tensor({"a": 1}).numpy()
    for wrong in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.uint8), array.reshape(1, -1), array.astype("int16")):
        with pytest.raises(ValueError, match="1D tensor of uint8"):
            uel.tensor_to_dict(wrong)


def test_unsupported_dtypes():
    with pytest.raises(ValueError, match="complex128"):
        uel.torch_to_st_dtype(torch.complex128)
    with pytest.raises(ValueError, match="F6_E2M3"):
        uel.st_to_torch_dtype("F6_E2M3")


class Pictures(Dataset):
    """Pictures with labels. Each picture is filled with its label."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_data_loader_matches_pytorch(num_workers, drop_last):
    ours = uel.UnifiedDataLoader(
        Pictures(), batch_size=7, num_workers=num_workers, prefetch_batches=3, pin_memory=True, drop_last=drop_last
    )
    expected = list(DataLoader(Pictures(), batch_size=7, drop_last=drop_last))
    assert len(ours) == len(expected)
    assert (ours.batch_size, ours.num_workers, ours.prefetch_batches) == (7, num_workers, 3)
    assert (ours.shuffle, ours.pin_memory, ours.drop_last) == (False, True, drop_last)
    for _ in range(2):
        for found, batch in zip(ours, expected, strict=True):
            torch.testing.assert_close(found, batch)
    with pytest.raises(KeyError, match="0"):
        next(iter(uel.UnifiedDataLoader({1: 2, 3: 4})))


@pytest.mark.gpu
def test_gpu_batches_are_ready_and_independent():
    loader = uel.UnifiedDataLoader(Pictures(), batch_size=8, direct_gpu=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            kept = list(loader)
            torch.cuda.synchronize()
        assert torch.cat([pictures[:, 0, 0, 0] for pictures, _ in kept]).tolist() == list(range(100))


@pytest.mark.parametrize("make", [uel.PinnedBufferPool, lambda *sizes: uel.GpuBufferPool(*sizes, device="cpu")])
def test_buffer_pools(make):
    pool = make(100, 2)
    assert pool.free_queue.qsize() == 2
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
    with pytest.raises(ValueError, match="not acquired"):
        pool.release(second)


def test_name_of_a_level_stays(fork_python):
    program = "import logging; from fst.compat import unifiedefficientloader; print(logging.getLevelName(30))"
    assert fork_python(program) == "WARNING\n"


def test_log_levels():
    # unifiedefficientloader changes the name when it is imported.
    warning = logging.getLevelName(logging.WARNING)
    program_handler = logging.NullHandler()
    logger = logging.getLogger("unifiedefficientloader")
    logger.addHandler(program_handler)
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            for _ in range(2):
                assert uel.setup_logging("VERBOSE") is logger
            for log in (uel.debug, uel.verbose, uel.normal, uel.info, uel.minimal, uel.warning, uel.error):
                log("%s words", "some")
        assert output.getvalue().splitlines() == [
            "[VERBOSE] some words",
            "some words",
            "some words",
            f"[{warning}] some words",
            f"[{warning}] some words",
            "[ERROR] some words",
        ]
        assert program_handler in logger.handlers
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


def test_shuffled_batches():
    batches = list(uel.UnifiedDataLoader(Pictures(), batch_size=32, shuffle=True, direct_gpu=True))
    assert {batch.is_cuda for pair in batches for batch in pair} == {torch.cuda.is_available()}
    for pictures, labels in batches:
        assert torch.equal(pictures[:, 0, 0, 0].long(), labels)
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(100))
