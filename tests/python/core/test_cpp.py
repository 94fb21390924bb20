"""C++ programs that find the library with CMake and run without Python."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fst
from conftest import CHECKOUT
from rawfile import DTYPES, Raw, bits_of, random_raw, write

EXAMPLE = CHECKOUT / "examples" / "libtorch"
PACKAGE = Path(fst.__file__).parent
LIBRARY = PACKAGE / "libfst.so"


def tool(name: str) -> str:
    """A build tool of this environment, or else of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is needed to build the C++ programs: pip install {name}"
    return found


def configure(source: Path, build: Path, prefix: str = fst.cmake_prefix_path) -> subprocess.CompletedProcess[str]:
    command = [tool("cmake"), "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    # Without a build type: a debug build has the same assertions, and takes more than twice as long.
    command += [f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"]
    return subprocess.run(command, capture_output=True, text=True)


def built(source: Path, build: Path) -> Path:
    done = configure(source, build)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([tool("cmake"), "--build", build], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.fixture(scope="session")
def example(tmp_path_factory):
    return built(EXAMPLE, tmp_path_factory.mktemp("libtorch")) / "fst_example"


@pytest.fixture(scope="session")
def modules(tmp_path_factory, python_environ):
    """What make_module.py makes for the example."""
    directory = tmp_path_factory.mktemp("modules")
    command = [sys.executable, EXAMPLE / "make_module.py", directory]
    done = subprocess.run(command, env=python_environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def run(program: Path, *arguments: object) -> list[str]:
    """Runs a C++ program without any environment in which a Python could be found."""
    done = subprocess.run([program, *arguments], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(name: str, tensor: torch.Tensor, kind: str) -> list[str]:
    """The words with which the example shows a tensor, numbers rounded."""
    values = tensor.detach().double().flatten()
    return [name, kind, str(list(tensor.shape)), *(f"{value:.4g}" for value in (values.sum(), *values[:4]))]


def parsed(line: str) -> list[str]:
    name, kind, shape, total, first = re.fullmatch(r"(\S+) (\S+) (\[.*\]) sum (\S+) first ?(.*)", line).groups()
    return [name, kind, shape, *(f"{float(value):.4g}" for value in (total, *first.split()))]


def expected_output(weights: dict[str, torch.Tensor]) -> list[str]:
    output = torch.nn.functional.linear(torch.linspace(0, 1, 8), weights["weight"], weights["bias"])
    return shown("forward", output, "Float")


def test_a_scripted_module_runs(example, modules):
    weights = fst.load_file(modules / "linear.safetensors")
    expected = [expected_output(weights), *(shown(name, tensor, "Float") for name, tensor in weights.items())]
    assert [parsed(line) for line in run(example, "run", modules / "linear.pt")] == expected


def test_a_package_runs(example, modules):
    """It reads the checkpoint whenever it runs."""
    checkpoint = modules / "linear.safetensors"
    stored = checkpoint.read_bytes()
    weights = fst.load_file(checkpoint)
    assert [parsed(line) for line in run(example, "run", modules / "linear.pt2")] == [expected_output(weights)]
    others = {name: tensor + 1 for name, tensor in weights.items()}
    raws = {name: Raw("F32", tuple(tensor.shape), bits_of(tensor)) for name, tensor in others.items()}
    write(checkpoint.with_suffix(".new"), raws).rename(checkpoint)
    try:
        assert [parsed(line) for line in run(example, "run", modules / "linear.pt2")] == [expected_output(others)]
    finally:
        checkpoint.write_bytes(stored)


def test_a_checkpoint_is_listed(example, tmp_path):
    kinds = {"BF16": "BFloat16", "I64": "Long", "U8": "Byte", "F64": "Double", "BOOL": "Bool"}
    tensors = {name: torch.arange(6).view(2, 3).to(DTYPES[name][0]) for name in kinds}
    raws = {name: Raw(name, (2, 3), bits_of(tensor)) for name, tensor in tensors.items()}
    path = write(tmp_path / "list.safetensors", raws)
    lines = run(example, "list", path)
    assert [parsed(line) for line in lines] == [shown(name, tensors[name], kind) for name, kind in kinds.items()]


def test_a_checkpoint_is_streamed(example, tmp_path):
    tensors = {f"t{index}": torch.arange(index, dtype=torch.float64) for index in range(30)}
    path = write(
        tmp_path / "s.safetensors", {name: Raw("F64", (len(of),), bits_of(of)) for name, of in tensors.items()}
    )
    lines = run(example, "stream", path)
    assert [parsed(line) for line in lines] == [shown(name, tensor, "Double") for name, tensor in tensors.items()]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["list", "stream"])
def test_a_gpu_gets_the_same(mode, request, tmp_path):
    if not (shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("there is no cmake or no ninja to build the example with")
    tensor = torch.arange(6, dtype=torch.float32)
    path = write(tmp_path / "w.safetensors", {"w": Raw("F32", (6,), bits_of(tensor))})
    lines = run(request.getfixturevalue("example"), mode, path, "cuda:0")
    assert [parsed(line) for line in lines] == [shown("w", tensor, "Float")]


def test_errors_are_reported(example, tmp_path):
    path = tmp_path / "missing.safetensors"
    done = subprocess.run([example, "list", path], env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"[file-not-found] {path}" in done.stderr


def test_every_function_of_the_header(tmp_path):
    program = built(CHECKOUT / "tests" / "cpp", tmp_path / "build") / "header"
    # Numbers without NaN, which would equal nothing.
    a = torch.arange(24, dtype=torch.float32).view(4, 6)
    raws = {
        "a": Raw("F32", (4, 6), bits_of(a)),
        "b": Raw("BF16", (6,), bits_of(torch.linspace(-1, 1, 6, dtype=torch.bfloat16))),
        "c": random_raw("I64", (2, 3)),
    }
    path = write(tmp_path / "model.safetensors", raws, {"format": "pt"})
    assert run(program, path, tmp_path) == ["all as it should be"]


@pytest.mark.parametrize("missing", ["library", "PyTorch"])
def test_cmake_says_what_is_wrong(missing, tmp_path):
    """Before anything is compiled."""
    package = tmp_path / "fst"
    shutil.copytree(PACKAGE / "share", package / "share")
    message = rf"{package}/libfst\.so\s+is\s+missing:\s+run\s+`make\s+build`"
    if missing == "PyTorch":
        (package / "libfst.so").write_bytes(b"\x7fELF" + bytes(100) + b"fst 0.1.0: built for PyTorch 1.13.1\0")
        message = rf"was\s+built\s+for\s+PyTorch\s+1\.13,\s+but\s+this\s+is\s+PyTorch\s+{torch.__version__[:4]}"
    done = configure(CHECKOUT / "tests" / "cpp", tmp_path / "build", str(package / "share" / "cmake"))
    assert done.returncode != 0
    assert re.search(message, done.stderr)


def test_cmake_reports_the_version(tmp_path):
    version = re.search(r'^version = "(.+)"$', (CHECKOUT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    version_file = Path(fst.cmake_prefix_path, "fst", "fstConfigVersion.cmake")
    script = tmp_path / "print.cmake"
    script.write_text(f'include("{version_file}")\nmessage(STATUS "version=${{PACKAGE_VERSION}}")\n')
    done = subprocess.run([tool("cmake"), "-P", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"-- version={version}"


@pytest.mark.parametrize(
    ("asked", "is_found"), [("0.1", True), ("0.1.0", True), ("0.1.1", False), ("0.0.9", False), ("1", False)]
)
def test_cmake_finds_compatible_versions(asked, is_found, tmp_path):
    version_file = Path(fst.cmake_prefix_path, "fst", "fstConfigVersion.cmake")
    script = tmp_path / "ask.cmake"
    script.write_text(
        f'set(PACKAGE_FIND_VERSION "{asked}")\ninclude("{version_file}")\n'
        "if(NOT PACKAGE_VERSION_COMPATIBLE)\n  message(FATAL_ERROR no)\nendif()\n"
    )
    assert (subprocess.run([tool("cmake"), "-P", script], capture_output=True).returncode == 0) == is_found


def test_the_page_shows_the_example():
    """Every C++ function and CMake command of the page stands in the program that was built, as it is."""
    page = (CHECKOUT / "docs" / "cpp.md").read_text()
    blocks = re.findall(r"```(?:cpp|cmake)\n(.*?)```", page, re.DOTALL)
    sources = [EXAMPLE / "main.cpp", EXAMPLE / "CMakeLists.txt", CHECKOUT / "tests" / "cpp" / "main.cpp"]
    text = "\n".join(source.read_text() for source in sources)
    dedented = re.sub(r"^ +", "", text, flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        assert re.sub(r"^ +", "", textwrap.dedent(block), flags=re.MULTILINE).strip() in dedented


def test_no_python_is_needed(example):
    """Neither the program nor the library is linked with a Python."""
    for binary in (example, LIBRARY):
        linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in linked
        assert "python" not in re.sub(r"=> \S+|/\S+/", "", linked)


def dynamic_section(binary: Path, tag: str) -> list[str]:
    text = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.+)\]", text)


def test_the_library_is_linked_with_no_cuda_library():
    """So that one build serves PyTorch with and without CUDA."""
    needed = dynamic_section(LIBRARY, "NEEDED")
    assert any(name.startswith("libtorch") for name in needed)
    assert not [name for name in needed if re.search(r"cuda|cufile|nv|python", name)]


def test_programs_ask_for_the_library_by_name(example):
    """Not by the path that it had when they were built."""
    assert dynamic_section(LIBRARY, "SONAME") == ["libfst.so"]
    assert "libfst.so" in dynamic_section(example, "NEEDED")
