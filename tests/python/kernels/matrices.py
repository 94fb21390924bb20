"""Launches of the dequantization kernel by a CPU, and the numbers that `fst.dequantize` gives on the CPU."""

import random
import struct
from dataclasses import dataclass, field

import torch

import fst
from fst._core.dtypes import SCALAR_TYPES
from launches import BLOCK_THREADS, TARGET_FILL
from rawfile import as_integers

# Fact of tests/kernels/launch.c.
DEQUANTIZE = 2
# Facts of rust/cast/dequantize_task.rs.
BATCH_MATRICES = 30
CHUNK_NUMBERS = 8
TILE_CHUNKS = 1024
SCHEMES = ["scale", "fp4", "mxfp4", "nvfp4", "nvfp4_div", "nvfp4_last"]

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8]
SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]
TARGETS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def code_dtypes(scheme: str) -> list[torch.dtype]:
    return CODES if scheme == "scale" else [torch.uint8]


def scale_dtypes(scheme: str) -> list[torch.dtype]:
    return {"scale": SCALES, "fp4": SCALES, "mxfp4": [torch.uint8]}.get(scheme, [torch.float8_e4m3fn])


@dataclass(frozen=True)
class Matrix:
    """Matrix of codes with its scales, with addresses relative to the source and the target."""

    scheme: str
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    addresses: tuple[int, int, int, int]
    begin: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    target_strides: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns * (1 if self.scheme == "scale" else 2)

    @property
    def tiles(self) -> int:
        row, column = self.target_strides
        is_down = row == self.dtype.itemsize != column
        lines, length = reversed(self.size) if is_down else self.size
        return -(-lines * -(-length // CHUNK_NUMBERS) // TILE_CHUNKS)

    def to_bytes(self, first_tile: int) -> bytes:
        """Returns the matrix as in rust/cast/dequantize_task.rs."""
        strides = [[stride * tensor.itemsize for stride in tensor.stride()] for tensor in (self.codes, self.scales)]
        pairs = (self.size, self.begin, self.block, *strides, self.target_strides)
        dtypes = [SCALAR_TYPES[dtype] for dtype in (self.codes.dtype, self.scales.dtype, self.dtype)]
        numbers = (*self.addresses, *(number for pair in pairs for number in pair))
        return struct.pack("<16QI4B", *numbers, first_tile, SCHEMES.index(self.scheme), *dtypes)

    def numbers(self, target: torch.Tensor) -> torch.Tensor:
        """Returns a view of the target's bytes."""
        item_bytes = self.dtype.itemsize
        strides = [stride // item_bytes for stride in self.target_strides]
        offset = self.addresses[3] % item_bytes
        typed = target[offset : offset + (len(target) - offset) // item_bytes * item_bytes].clone().view(self.dtype)
        return typed.as_strided(self.size, strides, self.addresses[3] // item_bytes)


@dataclass
class MatrixLaunch:
    """Matrices of one launch. The source has a random byte between any two of their tensors."""

    seed: int
    blocks: int = 2
    threads: int = BLOCK_THREADS
    matrices: list[Matrix] = field(default_factory=list)
    source: bytes = b""
    target_bytes: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._generator = torch.Generator().manual_seed(self.seed)

    def add(
        self,
        scheme: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        *,
        begin: tuple[int, int] = (0, 0),
        block: tuple[int, int],
        global_scale: float = 1.0,
        target: str = "rows",
    ) -> None:
        """Adds a matrix whose target has contiguous rows, contiguous columns, or gaps between its numbers."""
        factor = torch.tensor([global_scale]) if scheme.startswith("nvfp4") else None
        addresses = [self._place(codes), self._place(scales), 0 if factor is None else self._place(factor)]
        rows, columns = codes.shape[0], codes.shape[1] * (1 if scheme == "scale" else 2)
        item_bytes = dtype.itemsize
        gap = self.random.choice([0, 0, 1, 3])
        strides = {
            "rows": ((columns + gap) * item_bytes, item_bytes),
            "columns": (item_bytes, (rows + gap) * item_bytes),
            "gaps": (2 * columns * item_bytes, 2 * item_bytes),
        }[target]
        # Most targets begin at a multiple of 16.
        address = self.target_bytes + self.random.choice([0, 0, 1, 5]) * item_bytes
        end = address + (rows - 1) * strides[0] + (columns - 1) * strides[1] + item_bytes
        self.target_bytes = -(-end // 16) * 16
        self.matrices.append(Matrix(scheme, codes, scales, factor, (*addresses, address), begin, block, dtype, strides))

    def add_random(self) -> None:
        """Adds a matrix of random dtypes, strides, sizes, block and region."""
        choose = self.random.choice
        scheme = choose(SCHEMES)
        width = 1 if scheme == "scale" else 2
        rows, stored = self.random.randint(1, 60), self.random.randint(1, 60)
        begin = (self.random.randint(0, 90), self.random.randint(0, 50) * width)
        block = (choose([0, 1, 2, 5, 64]), choose([0, 1, 3, 8, 16]) * width)
        ends = (begin[0] + rows, begin[1] + stored * width)
        grid = [-(-end // size) if size else 1 for end, size in zip(ends, block, strict=True)]
        self.add(
            scheme,
            self.noise([rows, stored], choose(code_dtypes(scheme))),
            self.noise(grid, choose(scale_dtypes(scheme))),
            choose(TARGETS),
            begin=begin,
            block=block,
            global_scale=choose([0.37, 2688.0, 1e-42]),
            target=choose(["rows", "columns", "gaps"]),
        )

    def noise(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a matrix of random bytes, by rows or by columns."""
        if is_transposed := self.random.random() < 0.4:
            shape = shape[::-1]
        count = shape[0] * shape[1] * dtype.itemsize
        data = torch.randint(256, (count,), dtype=torch.uint8, generator=self._generator).view(dtype).view(shape)
        return data.t() if is_transposed else data

    def _place(self, tensor: torch.Tensor) -> int:
        """Appends the memory of a tensor to the source, aligned to its elements. Returns the address."""
        gap = self.random.randrange(1, 20)
        padding = gap + -(len(self.source) + gap) % tensor.itemsize
        address = len(self.source) + padding
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.source += self.random.randbytes(padding) + storage.numpy().tobytes()
        return address

    def to_bytes(self) -> bytes:
        tasks, tiles = [], 0
        for matrix in self.matrices:
            tasks.append(matrix.to_bytes(tiles))
            tiles += matrix.tiles
        # Allocations of a GPU are aligned, at both ends here.
        self.source += bytes(-len(self.source) % 16)
        sizes = (len(self.source), self.seed % 2, self.target_bytes, len(tasks), tiles)
        return (
            struct.pack("<9Q", DEQUANTIZE, self.blocks, self.threads, self.seed, *sizes) + b"".join(tasks) + self.source
        )

    def check(self, found: torch.Tensor) -> None:
        """Compares numbers with the CPU's. NaNs are equal, because GPUs choose their bits."""
        untouched = torch.ones(self.target_bytes, dtype=torch.bool)
        for matrix in self.matrices:
            expected = fst.dequantize(
                matrix.codes,
                matrix.scales,
                matrix.scheme,
                block=matrix.block,
                global_scale=matrix.global_scale,
                begin=matrix.begin,
                dtype=matrix.dtype,
            )
            result = matrix.numbers(found).contiguous()
            same = (as_integers(result) == as_integers(expected)) | (result.isnan() & expected.isnan())
            wrong = (~same).nonzero().tolist()
            assert not wrong, f"{len(wrong)} numbers of {matrix} differ, the first at {wrong[0]}"
            offset = matrix.addresses[3]
            items = untouched[offset:].as_strided(
                (*matrix.size, matrix.dtype.itemsize), (*matrix.target_strides, 1), offset
            )
            items.fill_(False)
        assert (found[untouched] == TARGET_FILL).all(), "bytes between numbers were written"


def all_pairs(scheme: str) -> MatrixLaunch:
    """Returns a launch of all codes with all scales of 8 bits, and with random scales that are wider."""
    launch = MatrixLaunch(seed=len(scheme), blocks=3)
    for index, kind in enumerate(code_dtypes(scheme)):
        codes = torch.arange(256, dtype=torch.uint8).view(kind).expand(256, -1)
        for scale_dtype in scale_dtypes(scheme):
            scales = torch.arange(256, dtype=torch.uint8)[:, None]
            if scale_dtype.itemsize > 1:
                if index > 0:
                    continue
                scales = launch.noise([256, 1], scale_dtype)
            target = ["rows", "columns"][index % 2]
            dtype = TARGETS[index % 4]
            launch.add(scheme, codes, scales.view(scale_dtype), dtype, block=(1, 0), global_scale=0.37, target=target)
    return launch
