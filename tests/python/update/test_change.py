"""Writes of staged changes have the bits of an assignment, in all dtypes and layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fst._core.fakes  # noqa: F401  (registers the operators)
from rawfile import DTYPES as STORED
from suite import DELAY_CYCLES, DEVICES

DTYPES = [*(dtype for dtype, _ in STORED.values()), torch.complex128]


def random_elements(dtype, count, seed=0):
    """Returns elements of random bits, NaNs of all kinds included. Bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    end = 2 if dtype == torch.bool else 256
    return torch.randint(end, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def rows(tensor):
    """Returns a copy of the elements in order, each as a row of bytes, on the CPU."""
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).view(-1, tensor.itemsize).clone()


def positions_of(numbers):
    return torch.tensor(numbers, dtype=torch.uint32)


def write(*changes):
    """Writes changes, each of a target, positions or None, and values."""
    write_lists(*(list(tensors) for tensors in zip(*changes, strict=True)))


def write_lists(targets, positions, values):
    update = torch.classes.fst.Update([], [])
    update.stage(targets, positions, values, None)
    update.commit()


def check(*changes):
    """Writes changes, each of a target, numbers of elements or None, and values. Compares with an assignment."""
    expected = []
    for target, numbers, values in changes:
        expected.append(rows(target))
        expected[-1][slice(None) if numbers is None else numbers] = rows(values)
    write(
        *(
            (target, None if numbers is None else positions_of(numbers).to(values.device), values)
            for target, numbers, values in changes
        )
    )
    for (target, *_), elements in zip(changes, expected, strict=True):
        assert torch.equal(rows(target), elements), target.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype(device):
    """Values of targets on a GPU are there or in host memory."""
    for dtype in DTYPES:
        targets = random_elements(dtype, 4000).to(device).split(1000)
        staged = random_elements(dtype, 1000, seed=1)
        numbers = [0, 1, 2, 500, 999]
        check((targets[0], None, staged), (targets[1], numbers, staged[:5]))
        values = staged.to(device)
        check((targets[2], None, values), (targets[3], numbers, values[:5]))


LAYOUTS = {
    "offset": lambda base: base[7:31],
    "transposed": lambda base: base[:24].view(4, 6).t(),
    "strided": lambda base: base[1:97:4].view(2, 3, 4),
    "slice": lambda base: base[:120].view(4, 5, 6)[1:3, ::2, 2:],
    "channels last": lambda base: base[:24].view(2, 2, 2, 3).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device):
    """Only elements of the target are written, not those between them."""
    values = torch.arange(-100.0, 0.0, device=device)
    for name, view in LAYOUTS.items():
        base, expected = torch.arange(200.0, device=device).repeat(2, 1)
        target = view(base)
        write((target, None, values[:24].view(target.shape)))
        view(expected).copy_(values[:24].view(target.shape))
        assert torch.equal(base, expected), name
        numbers = torch.tensor([0, 5, 6, 23], device=device)
        write((target, numbers.to(torch.uint32), values[30:70:10]))
        view(expected).put_(numbers, values[30:70:10])
        assert torch.equal(base, expected), name


def test_scalars_and_empty_tensors():
    scalar, empty = torch.zeros(()), torch.zeros(0, 3)
    check((scalar, [0], torch.ones(1)), (empty, [], torch.zeros(0)), (empty, None, torch.zeros(0, 3)))
    check((scalar, None, torch.tensor(2.0)), (torch.ones(5).t(), [], torch.zeros(0)))
    write_lists([], [], [])


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 40), st.data()), max_size=4), st.data())
def test_random_positions(tensors, data):
    changes = []
    for dtype, size, _ in tensors:
        numbers = data.draw(st.none() | st.sets(st.integers(0, size - 1)).map(sorted))
        count = size if numbers is None else len(numbers)
        changes.append((random_elements(dtype, size), numbers, random_elements(dtype, count, seed=1)))
    if changes:
        check(*changes)


def test_large_changes_of_several_threads():
    size = 1_500_000
    numbers = torch.randperm(size, generator=torch.Generator().manual_seed(0))[: size // 2].sort().values
    check(
        *(
            (random_elements(dtype, size), numbers.tolist(), random_elements(dtype, len(numbers), seed=1))
            for dtype in (torch.uint8, torch.complex128)
        ),
        (random_elements(torch.bfloat16, size), None, random_elements(torch.bfloat16, size, seed=1)),
    )


@pytest.mark.parametrize("view", [lambda parameter: parameter, torch.t], ids=["contiguous", "transposed"])
def test_autograd_sees_writes_without_recording_them(view):
    for numbers in (None, [0, 3]):
        parameter = torch.nn.Parameter(torch.ones(2, 3))
        target = view(parameter)
        loss = (parameter * parameter).sum()
        values = torch.zeros(target.shape) if numbers is None else torch.zeros(2)
        check((target, numbers, values))
        assert parameter.is_leaf
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            tensor = view(torch.ones(2, 3))
        check((tensor, numbers, values))


REFUSED = {
    "target on meta": ((torch.zeros(2, device="meta"), None, torch.zeros(2)), "change 1: the target is on meta"),
    "expanded target": ((torch.zeros(1).expand(2), None, torch.zeros(2)), "several elements that share memory"),
    "sparse values": ((torch.zeros(2), None, torch.zeros(2).to_sparse()), "the tensor of values is not dense"),
    "values on meta": (
        (torch.zeros(2), None, torch.zeros(2, device="meta")),
        "tensor of values is on meta",
    ),
    "dtype": ((torch.zeros(2), None, torch.zeros(2).half()), "must be of the target's dtype float32"),
    "shape": ((torch.zeros(2), None, torch.zeros(2, 1)), r"shape \[2, 1\], but the target has \[2\]"),
    "int64 positions": ((torch.zeros(2), torch.tensor([0]), torch.zeros(1)), "the positions are int64"),
    "shape of positions": ((torch.zeros(2), positions_of([[0]]), torch.zeros(1)), "must be 1-d uint32"),
    "too few values": ((torch.zeros(2), positions_of([0, 1]), torch.zeros(1)), "as many values"),
    "too many values": ((torch.zeros(1), positions_of([0, 0]), torch.zeros(2)), "at most the 1 elements"),
    "position beyond the target": (
        (torch.zeros(2), positions_of([0, 2]), torch.zeros(2)),
        "position 2 is not among the 2",
    ),
}


def test_nothing_is_written_if_a_change_is_wrong():
    good = torch.zeros(2)
    for name, (change, message) in REFUSED.items():
        with pytest.raises(ValueError, match=message) as error:
            write((good, None, torch.ones(2)), change)
        assert "nothing was written" in str(error.value), name
        assert torch.equal(good, torch.zeros(2)), name
    with pytest.raises(ValueError, match="2 targets, but 1 positions"):
        write_lists([good, good], [None], [good, good])


@pytest.mark.gpu
def test_writes_are_ordered_on_the_current_stream():
    target = torch.zeros(1 << 20, device="cuda")
    positions, values = positions_of([5, 1 << 19]).pin_memory(), torch.ones(2).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(DELAY_CYCLES)
        target.fill_(2)
        write((target, positions, values))
        # PyTorch may give their memory to others only when the copies are complete.
        del positions, values
        others = [torch.zeros(2).pin_memory() for _ in range(10)]
        assert target[[5, 1 << 19, 6]].tolist() == [1, 1, 2]
    del others
