"""Results of nvcc: the PTX of the device kernels, translated to C, gives the bits of PyTorch's casts.

The compiler of the machine code, ptxas or the driver, comes after PTX. `make gpu-check` tests it.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fatbin
import fst
from launches import BATCH_TASKS, LaunchError, Program, arrange
from patterns import PAIRS, patterns
from ptx import UntranslatedError, translate

# Without a cast, elements are bytes.
CONVERSIONS = [(stored, dtype) for stored, dtype in PAIRS if stored != dtype] + [(torch.uint8, torch.uint8)]
# PyTorch casts some NaNs and large numbers in another way where it has no vector loops.
pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector loops here"
)


@pytest.fixture(scope="module")
def ptx_of_image():
    """The PTX in the library, which drivers compile for GPUs that are newer than the library."""
    found = [entry for entry in fatbin.entries(Path(fst.__file__).parent / "libfst_core.so") if entry.is_ptx]
    if not found:
        pytest.skip("the library was built without nvcc")
    return found[0].ptx()


@pytest.fixture(scope="module")
def ptx_for_old_drivers():
    """The PTX in the library for compute capability 7.5, which has no instructions for BF16."""
    found = fatbin.ptx_for_old_drivers(Path(fst.__file__).parent / "libfst_core.so")
    if found is None:
        pytest.skip("the library was built without nvcc")
    return found


@pytest.fixture(scope="module")
def ptx_of_nvcc(tmp_path_factory):
    """PTX for compute capability 9.0."""
    return fatbin.compile_ptx([90], tmp_path_factory.mktemp("nvcc"))[90]


# One changed instruction each, by a regular expression and its replacement.
MUTATIONS = {
    "rounding": ("cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
    "operation": ("add.f32", "sub.f32"),
    "offset": (r"(ld\.u32 .*)\+4\]", r"\1+8]"),
    "comparison": ("setp.lt.u32", "setp.le.u32"),
    "constant": (r"(shr\.u32 .*), 23;", r"\1, 22;"),
    "order": (r"shf\.r\.wrap\.b32 (.*), (.*), (.*), (.*);", r"shf.r.wrap.b32 \1, \3, \2, \4;"),
}


@pytest.fixture(scope="module")
def programs(ptx_of_image, ptx_for_old_drivers, ptx_of_nvcc, tmp_path_factory):
    """The compiled kernels of the library and of nvcc. Variants of the last one are the mutations."""
    mutated = [re.subn(*mutation, ptx_of_nvcc, count=1) for mutation in MUTATIONS.values()]
    assert all(count == 1 for _, count in mutated)
    folder = tmp_path_factory.mktemp("programs")
    return {
        "image": Program(ptx_of_image, folder / "image"),
        75: Program(ptx_for_old_drivers, folder / "75"),
        90: Program(ptx_of_nvcc, folder / "90", [variant for variant, _ in mutated]),
    }


@pytest.fixture(params=["image", 75, 90])
def program(request, programs):
    return programs[request.param]


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
    program.check([all_patterns() if request.node.callspec.params["program"] == 90 else all_conversions()])


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


def test_accesses_outside_of_memory_are_reported(programs):
    program = programs["image"]
    launch = arrange([(torch.float16, torch.float32, 1, 16)], seed=0, is_source_at_end=True)
    shorter = launch.source[:-2]
    with pytest.raises(LaunchError, match="access at byte 30 of the source, which has 30 bytes"):
        program.check([replace(launch, source=shorter)])
    with pytest.raises(LaunchError, match=r"access at byte \d+ of the target, which has 48 bytes"):
        program.check([replace(launch, target_bytes=48)])


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_instruction_is_detected(name, programs):
    launches = [all_conversions(1000), *(launch for launch in random_launches(100) if not launch.is_inline)]
    programs[90].check(launches)
    with pytest.raises((AssertionError, LaunchError)):
        programs[90].check(launches, variant=1 + list(MUTATIONS).index(name))


def test_unknown_instruction_is_an_error(ptx_of_nvcc):
    ptx = ptx_of_nvcc
    translate(ptx)
    changes = [("add.f32", "add.ftz.f32"), ("ret;", "bar.sync 0;"), (".visible .entry", ".shared .b8 s[4]; .entry")]
    for old, new in changes:
        with pytest.raises(UntranslatedError, match=new.split()[0]):
            translate(ptx.replace(old, new, 1))
