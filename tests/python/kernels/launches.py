"""Launches of the device kernels by a CPU: random copies and writes by position, and the bytes that PyTorch gives."""

import os
import random
import shlex
import signal
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from fst._core.dtypes import SCALAR_TYPES
from patterns import cast_by_pytorch, patterns
from ptx import translate
from rawfile import as_integers
from suite import CHECKOUT

# Facts of rust/cast/scatter.rs.
TILE_BYTES = 16 << 10
TILE_POSITIONS = 4096
BATCH_TASKS = 85
BLOCK_THREADS = 256

# Fact of tests/kernels/launch.c: the value of a target's bytes before the launch.
TARGET_FILL = 0xEE

CPU_SECONDS_MAX = 60


class AnyLaunch(Protocol):
    """Launch of one of the kernels."""

    @property
    def target_bytes(self) -> int:
        """The length of the target."""

    def to_bytes(self) -> bytes:
        """Returns the launch in the format of tests/kernels/launch.c."""

    def check(self, found: torch.Tensor) -> None:
        """Compares a target with the expected one."""


class LaunchError(Exception):
    """A kernel does what a GPU would refuse, or does not end."""


@dataclass(frozen=True)
class Copy:
    """A strided copy as in rust/cast/scatter.rs, with addresses relative to the source and the target."""

    stored: torch.dtype
    dtype: torch.dtype
    source: int
    target: int
    rows: int
    row_elements: int
    stride_bytes: int

    @property
    def item_bytes(self) -> tuple[int, int]:
        """Bytes of a source and of a target element. Elements of a copy without a cast are bytes."""
        return (1, 1) if self.stored == self.dtype else (self.stored.itemsize, self.dtype.itemsize)

    @property
    def codes(self) -> tuple[int, int]:
        return (0, 0) if self.stored == self.dtype else (SCALAR_TYPES[self.stored], SCALAR_TYPES[self.dtype])

    @property
    def elements(self) -> int:
        return self.rows * self.row_elements

    @property
    def tiles(self) -> int:
        return -(-self.elements * max(self.item_bytes) // TILE_BYTES)

    @property
    def written(self) -> slice:
        """The bytes of the target."""
        return slice(self.target, self.target + self.elements * self.item_bytes[1])


@dataclass(frozen=True)
class Put:
    """Elements to write by position, as in rust/cast/put.rs, with addresses relative to the source and the target."""

    item_bytes: int
    positions: int
    values: int
    target: int
    elements: int

    @property
    def tiles(self) -> int:
        return -(-self.elements // TILE_POSITIONS)


@dataclass(frozen=True)
class Launch:
    """Copies and writes of one launch, and how it runs.

    Attributes:
        source: The bytes that the copies read.
        target_bytes: The length of the target.
        is_inline: Whether the tasks are parameters of the kernel.
        is_source_at_end: Whether the end of the source is the end of a page. Else, its beginning begins one.
        seed: Seed of the order of the threads.
    """

    copies: list[Copy]
    source: torch.Tensor
    target_bytes: int
    is_inline: bool = False
    is_source_at_end: bool = False
    blocks: int = 2
    threads: int = BLOCK_THREADS
    seed: int = 0
    puts: list[Put] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Returns the launch in the format of tests/kernels/launch.c."""
        tasks, tiles = [], 0
        for copy in self.copies:
            numbers = (copy.source, copy.target, copy.row_elements, copy.stride_bytes, copy.rows, tiles, *copy.codes)
            tasks.append(struct.pack("<4Q2I2B6x", *numbers))
            tiles += copy.tiles
        for put in self.puts:
            last_position = (self.target_bytes - put.target) // put.item_bytes - 1
            numbers = (put.values, put.target, put.elements, put.positions, last_position, tiles, 0, 0, put.item_bytes)
            tasks.append(struct.pack("<4Q2I3B5x", *numbers))
            tiles += put.tiles
        sizes = (len(self.source), self.is_source_at_end, self.target_bytes, len(tasks), tiles)
        # The inline kernel has the number 1.
        fields = (self.is_inline, self.blocks, self.threads, self.seed, *sizes)
        return struct.pack("<9Q", *fields) + b"".join(tasks) + self.source.numpy().tobytes()

    def check(self, found: torch.Tensor) -> None:
        """Compares a target with PyTorch's casts. NaNs are equal, because GPUs choose their bits."""
        untouched = torch.full((self.target_bytes,), TARGET_FILL, dtype=torch.uint8)
        for copy in self.copies:
            source_bytes, _ = copy.item_bytes
            row_bytes = copy.row_elements * source_bytes
            rows = self.source.as_strided((copy.rows, row_bytes), (copy.stride_bytes, 1), copy.source)
            expected = cast_by_pytorch(rows.clone().flatten().view(copy.stored), copy.dtype)
            result = found[copy.written].clone().view(copy.dtype)
            same = as_integers(result) == as_integers(expected)
            if copy.stored != copy.dtype:
                same |= result.float().isnan() & expected.float().isnan()
            wrong = (~same).nonzero().flatten().tolist()
            assert not wrong, f"{len(wrong)} elements of {copy} differ, the first at {wrong[0]}"
            untouched[copy.written] = found[copy.written]
        for put in self.puts:
            positions = self.source[put.positions :][: 4 * put.elements].clone().view(torch.int32).long()
            values = self.source[put.values :][: put.item_bytes * put.elements].view(-1, put.item_bytes)
            end = put.target + (len(untouched) - put.target) // put.item_bytes * put.item_bytes
            untouched[put.target : end].view(-1, put.item_bytes)[positions] = values
        assert torch.equal(found, untouched), "other bytes were written, or elements at positions were not"


class Program:
    """Kernels of PTX, compiled for this CPU."""

    def __init__(self, ptx: str, folder: Path) -> None:
        self._folder = folder
        (folder / "kernels.c").write_text(translate(ptx))
        # Optimizing thousands of statements would take longer than it saves.
        compiler = [*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11", "-O0", "-w"]
        # Integers wrap around, and no operation on floats is merged or moved.
        compiler += ["-fwrapv", "-ffp-contract=off"]
        kernels = CHECKOUT / "tests" / "kernels"
        command = [*compiler, "-I", kernels, folder / "kernels.c", kernels / "launch.c", "-lm", "-o", folder / "launch"]
        subprocess.run(command, check=True)

    def check(self, launches: Sequence[AnyLaunch]) -> None:
        """Runs launches, and compares their targets with the expected ones.

        Raises:
            LaunchError: An access is not aligned or is outside the memory of its launch, or a launch does not end.
            AssertionError: A target differs.
        """
        given, results = self._folder / "launches", self._folder / "targets"
        given.write_bytes(b"".join(launch.to_bytes() for launch in launches))
        # CPU time, since other tests may have the processors.
        command = ["prlimit", f"--cpu={CPU_SECONDS_MAX}", self._folder / "launch", given, results]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise LaunchError("the launches do not end")
        if done.returncode == 1:
            raise LaunchError(done.stderr)
        assert done.returncode == 0, (done.returncode, done.stderr)
        targets = torch.frombuffer(bytearray(results.read_bytes()), dtype=torch.uint8)
        lengths = [launch.target_bytes for launch in launches]
        for launch, target in zip(launches, targets.split(lengths), strict=True):
            launch.check(target)


def arrange(shapes: Sequence[tuple[torch.dtype, torch.dtype, int, int]], seed: int, **options: object) -> Launch:
    """Returns a launch of copies, with random gaps between the copies and between their rows.

    A shape is the dtypes of a source and a target, the number of rows, and their length in elements of the source.
    """
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    copies: list[Copy] = []
    pieces: list[torch.Tensor] = []
    source = 0
    for stored, dtype, rows, row_elements in shapes:
        gap_bytes = choose.randrange(20) if copies else 0
        row_bytes = row_elements * stored.itemsize
        stride_bytes = row_bytes + (0 if rows == 1 else choose.choice([0, *range(20)]))
        used_bytes = (rows - 1) * stride_bytes + row_bytes
        row_items = row_bytes if stored == dtype else row_elements
        copies.append(Copy(stored, dtype, source + gap_bytes, 0, rows, row_items, stride_bytes))
        source += gap_bytes + used_bytes

        values = patterns(stored)
        if rows * row_elements != len(values):
            values = values[torch.randint(len(values), (rows * row_elements,), generator=generator)]
        padded = torch.randint(256, (rows, stride_bytes), dtype=torch.uint8, generator=generator)
        padded[:, :row_bytes] = as_integers(values).view(torch.uint8).view(rows, row_bytes)
        pieces += [torch.zeros(gap_bytes, dtype=torch.uint8), padded.flatten()[:used_bytes]]

    # The last copy ends at the end of the target, which ends a page. So each begins at a distance from the end.
    distances, distance = [], 0
    for copy in reversed(copies):
        item_bytes = copy.item_bytes[1]
        distance = -(-distance // item_bytes) * item_bytes + copy.elements * item_bytes
        distances.append(distance)
        distance += choose.choice([0, *range(20)]) * item_bytes
    target_bytes = -(-distance // 16) * 16
    copies = [
        replace(copy, target=target_bytes - distance)
        for copy, distance in zip(copies, reversed(distances), strict=True)
    ]
    return Launch(copies, torch.cat(pieces), target_bytes, seed=seed, **options)


def arrange_puts(shapes: Sequence[tuple[int, int, int]], seed: int, **options: object) -> Launch:
    """Returns a launch of writes to random positions.

    A shape is the bytes of an element, the number of positions, and the number of elements of the target.
    """
    generator = torch.Generator().manual_seed(seed)
    puts: list[Put] = []
    source, target_bytes = torch.empty(0, dtype=torch.uint8), 0
    for item_bytes, elements, target_elements in shapes:
        values = torch.randint(256, (item_bytes * (1 + elements),), dtype=torch.uint8, generator=generator)
        numbers = torch.randperm(target_elements, generator=generator)[:elements].sort().values.int().view(torch.uint8)
        # Values and target begin at their second element.
        values_at, positions_at = len(source) + item_bytes, len(source) + len(_padded(values))
        puts.append(Put(item_bytes, positions_at, values_at, target_bytes + item_bytes, elements))
        source = torch.cat([source, _padded(values), _padded(numbers)])
        target_bytes += -(-item_bytes * (1 + target_elements) // 16) * 16
    return Launch([], source, target_bytes, seed=seed, puts=puts, **options)


def _padded(data: torch.Tensor) -> torch.Tensor:
    """Returns bytes with zeros up to a multiple of 16."""
    return torch.cat([data, torch.zeros(-len(data) % 16, dtype=torch.uint8)])
