"""C++ programs that find fst with CMake and run without Python."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fst
from fst._core.build import layer_for
from rawfile import DTYPES, Raw, bits_of, random_raw, write
from saved import KEY
from suite import CHECKOUT

EXAMPLE = CHECKOUT / "examples" / "libtorch"
PROGRAMS = CHECKOUT / "tests" / "cpp"
PACKAGE = Path(fst.__file__).parent
LIBRARY = layer_for(torch.__version__)


def tool(name: str) -> str:
    """Returns the path of a build tool, from this environment or the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not found and os.environ.get("FST_REQUIRE_GPU") == "1":
        pytest.skip(f"machines with a GPU may lack {name}")
    assert found, f"{name} is needed to build the C++ programs: pip install {name}"
    return found


def configure(build: Path, prefix: str = fst.cmake_prefix_path) -> subprocess.CompletedProcess[str]:
    command = [tool("cmake"), "-S", PROGRAMS, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    # No build type: a debug build takes more than twice as long and has the same assertions.
    command += ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Directory with the example and the program `header`."""
    build = tmp_path_factory.mktemp("programs")
    for done in (configure(build), subprocess.run([tool("cmake"), "--build", build], capture_output=True, text=True)):
        assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.fixture(scope="session")
def example(programs):
    return programs / "example" / "fst_example"


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """Directory with the output of make_module.py."""
    directory = tmp_path_factory.mktemp("modules")
    runpy.run_path(str(EXAMPLE / "make_module.py"), run_name="make_module")["main"](directory)
    return directory


def run(program: Path, *arguments: object) -> list[str]:
    """Runs a C++ program with an empty environment, in which no Python can be found."""
    done = subprocess.run([program, *arguments], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def words_of(name: str, tensor: torch.Tensor, kind: str) -> list[str]:
    """Returns the words that the example prints for a tensor, with rounded numbers."""
    values = tensor.detach().double().flatten()
    return [name, kind, str(list(tensor.shape)), *(f"{value:.4g}" for value in (values.sum(), *values[:4]))]


def parsed(line: str) -> list[str]:
    name, kind, shape, total, first = re.fullmatch(r"(\S+) (\S+) (\[.*\]) sum (\S+) first ?(.*)", line).groups()
    return [name, kind, shape, *(f"{float(value):.4g}" for value in (total, *first.split()))]


def expected_output(weights: dict[str, torch.Tensor]) -> list[str]:
    output = torch.nn.functional.linear(torch.linspace(0, 1, 8), weights["weight"], weights["bias"])
    return words_of("forward", output, "Float")


def test_run_scripted_module(example, modules):
    weights = fst.load_file(modules / "linear.safetensors")
    expected = [expected_output(weights), *(words_of(name, tensor, "Float") for name, tensor in weights.items())]
    assert [parsed(line) for line in run(example, "run", modules / "linear.pt")] == expected


def test_run_package(example, modules):
    """An AOTInductor package reads the checkpoint at each run."""
    checkpoint = modules / "linear.safetensors"
    stored = checkpoint.read_bytes()
    weights = fst.load_file(checkpoint)
    assert [parsed(line) for line in run(example, "run", modules / "linear.pt2")] == [expected_output(weights)]
    others = {name: tensor + 1 for name, tensor in weights.items()}
    fst.save_file(others, checkpoint)
    try:
        assert [parsed(line) for line in run(example, "run", modules / "linear.pt2")] == [expected_output(others)]
    finally:
        checkpoint.write_bytes(stored)


def test_update_scripted_module(example, modules):
    layer, checkpoint = torch.jit.load(modules / "layer.pt"), modules / "linear.safetensors"
    *outputs, version = run(example, "update", modules / "layer.pt", checkpoint)
    weights = [layer.state_dict(), fst.load_file(checkpoint)]
    assert [parsed(line) for line in outputs] == [expected_output(each) for each in weights]
    assert version == f"version {checkpoint}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_list_and_stream_checkpoint(example, tmp_path, device):
    kinds = {"BF16": "BFloat16", "I64": "Long", "U8": "Byte", "F64": "Double", "BOOL": "Bool"}
    tensors = {name: torch.arange(6).view(2, 3).to(DTYPES[name][0]) for name in kinds}
    path = write(tmp_path / "m.safetensors", {name: Raw(name, (2, 3), bits_of(of)) for name, of in tensors.items()})
    for mode in ("list", "stream"):
        lines = run(example, mode, path, device)
        assert [parsed(line) for line in lines] == [words_of(name, tensors[name], kind) for name, kind in kinds.items()]


def test_errors_are_reported(example, tmp_path):
    path = tmp_path / "missing.safetensors"
    done = subprocess.run([example, "list", path], env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"[file-not-found] {path}" in done.stderr


def test_all_functions_of_header(programs, tmp_path):
    # No NaN, because the program compares values.
    a = torch.arange(24, dtype=torch.float32).view(4, 6)
    raws = {
        "a": Raw("F32", (4, 6), bits_of(a)),
        "b": Raw("BF16", (6,), bits_of(torch.linspace(-1, 1, 6, dtype=torch.bfloat16))),
        "c": random_raw("I64", (2, 3)),
    }
    path = write(tmp_path / "model.safetensors", raws, {"format": "pt"})
    (tmp_path / "model.key").write_bytes(KEY.to_bytes())
    fst.save_file({"a": a}, tmp_path / "secret.safetensors", encryption_key=KEY)
    assert run(programs / "header", path, tmp_path) == ["all checks passed"]


@pytest.mark.parametrize("missing", ["library", "PyTorch"])
def test_cmake_reports_unusable_library(missing, tmp_path):
    """CMake reports a missing or mismatched library before it compiles anything."""
    package = tmp_path / "fst"
    shutil.copytree(PACKAGE / "share", package / "share")
    message = f"{package}/{LIBRARY.name} is missing: run `make build`"
    if missing == "PyTorch":
        for release in ("1.12", "1.13"):
            layer = package / f"libfst_torch_{release}.so"
            layer.write_bytes(b"\x7fELF" + bytes(100) + b"fst 0.1.0: built for PyTorch 1\0")
        message = f"was built for PyTorch 1.12, 1.13, but this is PyTorch {torch.__version__[:4]}"
    done = configure(tmp_path / "build", str(package / "share" / "cmake"))
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


def test_cmake_version(tmp_path):
    version = re.search(r'^version = "(.+)"$', (CHECKOUT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    script = tmp_path / "ask.cmake"
    script.write_text(
        """
foreach(PACKAGE_FIND_VERSION 0.1 0.1.0 0.1.1 0.0.9 1)
  unset(PACKAGE_VERSION_COMPATIBLE)
  include("${FILE}")
  message(STATUS "${PACKAGE_VERSION} for ${PACKAGE_FIND_VERSION}: ${PACKAGE_VERSION_COMPATIBLE}")
endforeach()
"""
    )
    command = [tool("cmake"), f"-DFILE={Path(fst.cmake_prefix_path, 'fst', 'fstConfigVersion.cmake')}", "-P", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = [f"-- {version} for {asked}: TRUE" for asked in ("0.1", "0.1.0")]
    answers += [f"-- {version} for {asked}: FALSE" for asked in ("0.1.1", "0.0.9", "1")]
    assert done.stdout.splitlines() == answers


def test_docs_match_example():
    """Every C++ and CMake block of the page is part of the programs that the tests build."""
    page = (CHECKOUT / "docs" / "cpp.md").read_text()
    blocks = re.findall(r"```(?:cpp|cmake)\n(.*?)```", page, re.DOTALL)
    sources = [EXAMPLE / "main.cpp", EXAMPLE / "CMakeLists.txt", PROGRAMS / "main.cpp"]
    text = "\n".join(source.read_text() for source in sources)
    dedented = re.sub(r"^ +", "", text, flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        assert re.sub(r"^ +", "", textwrap.dedent(block), flags=re.MULTILINE).strip() in dedented


def dynamic_section(binary: Path, tag: str) -> list[str]:
    text = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.+)\]", text)


def test_linked_libraries(example):
    """Neither the program nor the library is linked with libpython, and one build works with and without CUDA."""
    for binary in (example, LIBRARY):
        linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in linked
        assert "python" not in re.sub(r"=> \S+|/\S+/", "", linked)
    needed = dynamic_section(LIBRARY, "NEEDED")
    assert any(name.startswith("libtorch") for name in needed)
    assert not [name for name in needed if re.search(r"cuda|cufile|nv|python", name)]
    # Programs refer to the library by name, not by its path at build time.
    assert dynamic_section(LIBRARY, "SONAME") == [LIBRARY.name]
    assert LIBRARY.name in dynamic_section(example, "NEEDED")
    assert "libfst_core.so" in needed
