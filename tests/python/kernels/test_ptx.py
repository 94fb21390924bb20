"""Results of nvcc: the PTX of the device kernels, translated to C, gives the bits of PyTorch's casts, and the numbers
that the CPU dequantizes.

The compiler of the machine code, ptxas or the driver, comes after PTX. Tests marked `gpu` test it.
"""

import random
from dataclasses import replace

import pytest
import torch

import fatbin
from launches import BATCH_TASKS, LaunchError, Program, arrange, arrange_puts
from matrices import BATCH_MATRICES, SCHEMES, MatrixLaunch, all_pairs
from patterns import FLOATS, INTEGERS, patterns
from ptx import UntranslatedError, translate

# Without a cast, elements are bytes.
CONVERSIONS = [(stored, dtype) for stored in FLOATS + INTEGERS for dtype in FLOATS if stored != dtype]
CONVERSIONS += [(torch.uint8, torch.uint8)]
# PyTorch casts some NaNs and large numbers in another way where it has no vector loops.
pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector loops here"
)


@pytest.fixture(scope="module")
def ptx_of_nvcc(tmp_path_factory):
    """PTX for compute capability 9.0."""
    return fatbin.compile_ptx(90, tmp_path_factory.mktemp("nvcc"))


@pytest.fixture(scope="module")
def ptx_of_library():
    """The PTX in the library for compute capability 7.5, which has no instructions for BF16."""
    return fatbin.ptx_for_old_drivers()


@pytest.fixture(scope="module", params=["ptx_of_nvcc", "ptx_of_library"])
def program(request, tmp_path_factory):
    """The compiled kernels."""
    return Program(request.getfixturevalue(request.param), tmp_path_factory.mktemp("program"))


def all_conversions(elements=8192):
    """Returns a launch of all casts, of random patterns: each of the 8 elements of a chunk has code of its own."""
    return arrange([(stored, dtype, 1, elements) for stored, dtype in CONVERSIONS], seed=1, blocks=3)


def random_launches(count):
    """Returns small launches: rows with gaps, all alignments, single elements, and tables of one to six tasks."""
    for seed in range(count):
        choose = random.Random(seed)
        shapes = [
            (*choose.choice(CONVERSIONS), choose.choice([1, 1, choose.randint(2, 9)]), choose.randint(1, 100))
            for _ in range(choose.randint(1, 6))
        ]
        yield arrange(
            shapes,
            seed,
            is_inline=choose.random() < 0.5,
            is_source_at_end=choose.random() < 0.5,
            blocks=choose.randint(1, 4),
            threads=choose.randint(1, 64),
        )


def all_patterns():
    """Returns a launch of all casts, of all values of up to 16 bits, and of those around rounding boundaries."""
    shapes = [(stored, dtype, 1, len(patterns(stored))) for stored, dtype in CONVERSIONS]
    return arrange(shapes, seed=1, blocks=8)


def test_every_cast_matches_pytorch(request, program):
    is_of_nvcc = request.node.callspec.params["program"] == "ptx_of_nvcc"
    program.check([all_patterns() if is_of_nvcc else all_conversions()])


def test_tiles_and_rows(program):
    """Rows that are longer and shorter than a tile and than a block of threads, with both kernels."""
    shapes = [
        (torch.float16, torch.float32, 3, 5000),
        (torch.int64, torch.bfloat16, 700, 11),
        (torch.uint8, torch.uint8, 2, 40_000),
        (torch.float64, torch.float8_e4m3fn, 1, 6000),
        (torch.float32, torch.float64, 40, 120),
    ]
    for_parameters = [*shapes, *shapes * 16][:BATCH_TASKS]
    program.check(
        [
            arrange(shapes, seed=1, blocks=7),
            arrange(shapes, seed=2, blocks=1, threads=37),
            arrange([(stored, dtype, 2, 30) for stored, dtype, *_ in for_parameters], seed=3, is_inline=True),
        ]
    )


def test_random_launches(program):
    program.check(list(random_launches(300)))


def test_elements_are_written_by_position(program):
    """All widths, with tiles that are full, and blocks of several tiles, with both kernels."""
    sizes = [(1, 3), (1000, 1000), (4096, 9000), (5000, 6000)]
    shapes = [(item_bytes, *sizes[(index + item_bytes) % 4]) for item_bytes in (1, 2, 4, 8, 16) for index in range(2)]
    program.check(
        [
            arrange_puts(shapes, seed=1, blocks=3),
            arrange_puts(shapes, seed=2, threads=37, is_inline=True, is_source_at_end=True),
        ]
    )


def test_all_codes_are_dequantized_with_all_scales(program):
    program.check([all_pairs(scheme) for scheme in SCHEMES])


def test_random_matrices_are_dequantized(program):
    """Blocks, parts of blocks, strides of codes, scales and target, and a tile of several blocks of threads."""
    launches = []
    for seed in range(12):
        launch = MatrixLaunch(seed, blocks=1 + seed % 3, threads=[256, 37, 1][seed % 3])
        for _ in range(BATCH_MATRICES if seed == 0 else 6):
            launch.add_random()
        launches.append(launch)
    large = MatrixLaunch(99, blocks=3)
    for target in ("rows", "columns"):
        codes, scales = large.noise([300, 200], torch.float8_e4m3fn), large.noise([3, 2], torch.float32)
        large.add("scale", codes, scales, torch.bfloat16, block=(128, 128), target=target)
    program.check([*launches, large])


def test_accesses_outside_of_memory_are_reported(program):
    launch = arrange([(torch.float16, torch.float32, 1, 16)], seed=0, is_source_at_end=True)
    shorter = launch.source[:-2]
    with pytest.raises(LaunchError, match="access at byte 30 of the source, which has 30 bytes"):
        program.check([replace(launch, source=shorter)])
    with pytest.raises(LaunchError, match=r"access at byte \d+ of the target, which has 48 bytes"):
        program.check([replace(launch, target_bytes=48)])


def test_unknown_instruction_is_an_error(ptx_of_nvcc):
    changes = [("add.f32", "add.ftz.f32"), ("ret;", "bar.sync 0;"), (".visible .entry", ".shared .b8 s[4]; .entry")]
    for old, new in changes:
        with pytest.raises(UntranslatedError, match=new.split()[0]):
            translate(ptx_of_nvcc.replace(old, new, 1))
