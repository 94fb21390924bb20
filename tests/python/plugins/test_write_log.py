"""Logs of writes: the values are those that the program would have written itself."""

import contextlib
import queue
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._deferred.tensor import DeferredTensor, NotRecordedError
from fst._deferred.view import Stored, View
from fst._deferred.write_log import WriteLog
from suite import DEVICES

CPU = torch.device("cpu")
TARGETS = [
    lambda memory: memory["matrix"],
    lambda memory: memory["matrix"][:4],
    lambda memory: memory["matrix"][2:6, ::2],
    lambda memory: memory["matrix"][:, 3:],
    lambda memory: memory["matrix"].t(),
    lambda memory: memory["experts"][1],
    lambda memory: memory["experts"][:, 2:4],
    lambda memory: memory["experts"].permute(2, 0, 1),
    lambda memory: memory["small"],
    lambda memory: memory["small"][3:5],
]
SOURCES = [
    lambda tensors, shape: tensors["float"].narrow(0, 0, shape.numel()).view(shape),
    lambda tensors, shape: tensors["half"].narrow(0, 1, shape.numel()).view(shape),
    lambda tensors, shape: (
        tensors["float"].narrow(0, 2, shape.numel()).view(shape[::-1]).permute(*reversed(range(len(shape))))
    ),
    lambda tensors, shape: tensors["half"].narrow(0, 0, 2 * shape.numel())[::2].view(shape).float(),
    lambda tensors, shape: torch.stack([tensors["float"].narrow(0, 3, shape[1:].numel()).view(shape[1:])] * shape[0]),
    lambda tensors, shape: tensors["half"][5:6].view([1] * len(shape)).expand(shape),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "m.safetensors"
    save_file({"float": torch.randn(400), "half": torch.randn(400).half()}, path)
    return OpenCheckpoint([str(path)])


def new_memory(device="cpu"):
    shapes = {"matrix": (8, 6), "experts": (3, 4, 5), "small": (9,)}
    return {name: torch.full(shape, -1.0, device=device) for name, shape in shapes.items()}


def run(steps, memory, tensors):
    """Copies, fills, computes and reads, as a loader of a model may do. Returns what it has read."""
    read = []
    for kind, target, source in steps:
        view = TARGETS[target](memory)
        if kind == "copy":
            view.copy_(SOURCES[source](tensors, view.shape))
        elif kind == "fill":
            view.fill_(source)
        elif kind == "known":
            view.copy_(torch.full(view.shape, float(source), device=view.device))
        elif kind == "bits":
            view.view(torch.int32).copy_(SOURCES[0](tensors, view.shape).view(torch.int32))
        elif kind == "new":
            view.copy_(torch.zeros_like(values := SOURCES[source](tensors, view.shape)).copy_(values))
        elif kind == "array":
            array = view.cpu().numpy()
            read.append(float(array.max()))
            if view.device.type == "cpu":
                array[...] = source
        elif kind == "add":
            view.add_(source)
        else:
            read.append(float(view.max()))
    return read


STEP = st.tuples(
    st.sampled_from(["copy"] * 4 + ["fill", "known", "add", "read", "bits", "new", "array"]),
    st.integers(0, len(TARGETS) - 1),
    st.integers(0, len(SOURCES) - 1),
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, max_size=8))
def test_values_are_those_of_the_program(checkpoint, device, steps):
    real = {name: checkpoint.read(name) for name in checkpoint.names()}
    expected = new_memory()
    expected_reads = run(steps, expected, real)
    memory = new_memory(device)
    for restores in (True, False):
        log = WriteLog(memory.values())
        deferred = {
            name: DeferredTensor(View(meta, Stored(meta, checkpoint, name)), torch.device(device))
            for name, meta in checkpoint.tensors.items()
        }
        with log.record():
            assert run(steps, memory, deferred) == expected_reads
        if restores:
            # The program runs again on what it finds then.
            log.restore()
        else:
            log.fill(batch_bytes=100)
    for name, tensor in expected.items():
        assert torch.equal(memory[name].cpu(), tensor)


def test_values_that_are_needed_end_the_record(checkpoint):
    meta = checkpoint.tensors["float"]
    memory = torch.zeros(400)
    for use in (
        lambda tensor: memory.copy_(tensor * 2),
        lambda tensor: tensor.sum().item(),
        lambda tensor: memory.add_(tensor),
        # A cast of bits, a part of them in a new tensor, and a column of elements that others of the file divide.
        lambda tensor: memory.copy_(tensor.view(torch.int32)),
        lambda tensor: memory.view(torch.int32).copy_(tensor.view(torch.int32).clone()),
        lambda tensor: memory.view(torch.int16)[::2].copy_(tensor.view(torch.int16)[::2]),
        lambda tensor: memory.copy_(tensor.view(torch.int32).zero_()),
        lambda tensor: torch.empty_like(memory, device="meta").copy_(tensor),
    ):
        log = WriteLog([memory])
        tensor = DeferredTensor(View(meta, Stored(meta, checkpoint, "float")), CPU)
        with log.record(), pytest.raises(NotRecordedError, match='"float"'):
            use(tensor)
        # Programs may catch the exception.
        assert '"float"' in log.obstacle
        assert not memory.any()


def test_views_of_bits_are_copied(checkpoint):
    """Also as elements of another size, transposed, and again as the first dtype."""
    tensors = {"float": checkpoint.read("float"), "half": checkpoint.read("half")}
    copies = [
        lambda memory, tensors: memory.view(torch.int32).copy_(tensors["float"].view(torch.int32)),
        lambda memory, tensors: (
            memory.view(torch.int32).view(20, 20).t().copy_(tensors["float"].view(torch.int32).view(20, 20))
        ),
        lambda memory, tensors: memory[:100].copy_(tensors["half"][200:].view(torch.float32)),
        lambda memory, tensors: memory[8:28].copy_(tensors["float"].view(torch.uint8).view(torch.float32)[40:60]),
        lambda memory, tensors: memory.view(torch.bfloat16)[:400].copy_(tensors["half"].view(torch.bfloat16)),
        lambda memory, tensors: memory.view(torch.int16)[::4].copy_(tensors["half"].view(torch.int16)[:200]),
    ]
    for copy in copies:
        expected = torch.zeros(400)
        copy(expected, tensors)
        log = WriteLog([memory := torch.zeros(400)])
        with log.record():
            copy(
                memory,
                {
                    name: DeferredTensor(View(meta, Stored(meta, checkpoint, name)), CPU)
                    for name, meta in checkpoint.tensors.items()
                },
            )
        assert log.writes()
        log.fill()
        assert torch.equal(memory.view(torch.int32), expected.view(torch.int32))


def test_memory_that_is_used_without_operators_has_its_values(checkpoint):
    """Also through an array that shares it, and after values are copied to a new tensor."""
    values = checkpoint.read("float")
    tensor = DeferredTensor(View(meta := checkpoint.tensors["float"], Stored(meta, checkpoint, "float")), CPU)
    # Larger than what is written at once.
    log = WriteLog([memory := torch.zeros(2000)])
    with log.record():
        memory[:400].copy_(tensor)
        assert memory.tolist()[:400] == values.tolist()
        array = memory.numpy()
        memory[400:800].copy_(tensor)
        memory[800:].fill_(3)
        assert (array[400:800] == values.numpy()).all()
        array[:800] = 2
        padded = torch.zeros_like(tensor).new_zeros(1200)
        padded[800:].copy_(tensor)
        assert (padded.numpy()[800:] == values.numpy()).all()
    log.fill()
    assert memory.tolist() == [2] * 800 + [3] * 1200
    # Methods are PyTorch's again.
    assert "numpy" not in vars(torch.Tensor)


def test_other_threads_cannot_write(checkpoint):
    """Values that a thread which runs already would copy are missing otherwise."""
    log = WriteLog([memory := torch.zeros(400)])
    tasks: queue.Queue = queue.Queue()

    def work():
        with contextlib.suppress(NotRecordedError):
            memory.copy_(tasks.get())

    (thread := threading.Thread(target=work)).start()
    with log.record():
        meta = checkpoint.tensors["float"]
        tasks.put(log.track(DeferredTensor(View(meta, Stored(meta, checkpoint, "float")), CPU)))
        thread.join()
    assert "aten.copy_.default changes" in log.obstacle
