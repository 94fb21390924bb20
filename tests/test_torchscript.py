"""Scripted modules that load their own weights, in Python and in a C++ program without Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fst
from conftest import CHECKOUT
from rawfile import DTYPES, Raw, assert_same, bits_of, random_raw, write

EXAMPLE = CHECKOUT / "examples" / "libtorch"
WEIGHTS = {"weight": random_raw("BF16", (5, 3)), "bias": random_raw("I16", (5,))}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class SelfLoading(torch.nn.Module):
    """Loads its weights in `forward` and in other methods."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = torch.ops.fst.load_tensors([self.path], ["weight", "bias"], "cpu", dtype=torch.float32)
        return torch.nn.functional.linear(x, weight, bias.float())

    @torch.jit.export
    def everything(self) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_file(self.path, torch.device("cpu"))

    @torch.jit.export
    def from_files(self) -> dict[str, torch.Tensor]:
        return torch.ops.fst.load_files([self.path])

    @torch.jit.export
    def columns(self) -> list[torch.Tensor]:
        return torch.ops.fst.load_slices([self.path], ["weight", "bias"], [1, 0], [1, 0], [2, 4])

    @torch.jit.export
    def corners(self) -> list[torch.Tensor]:
        checkpoint = torch.classes.fst.Checkpoint([self.path])
        boxes = checkpoint.load_boxes(checkpoint.names(), [0, 0, 1], [3, 2, 2], [2, 2, 3])
        return boxes + torch.ops.fst.load_boxes([self.path], ["bias"], [0], [2], [4])

    @torch.jit.export
    def fill(self, weight: torch.Tensor) -> None:
        torch.ops.fst.load_into([self.path], ["weight"], [weight])

    @torch.jit.export
    def names(self) -> list[str]:
        return torch.ops.fst.tensor_names([self.path])

    @torch.jit.export
    def texts(self) -> dict[str, str]:
        return torch.ops.fst.metadata(self.path)

    @torch.jit.export
    def one_by_one(self) -> dict[str, torch.Tensor]:
        loader = torch.classes.fst.Loader([self.path], torch.device("cpu"), ["weight", "bias"], None, 1)
        tensors: dict[str, torch.Tensor] = {}
        item = loader.next()
        while item is not None:
            # TorchScript does not see that the condition says so.
            assert item is not None
            _, name, tensor = item
            tensors[name] = tensor
            item = loader.next()
        loader.close()
        return tensors

    @torch.jit.export
    def twice(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.ops.fst.load_tensors([self.path], ["bias"])
        second = torch.ops.fst.load_tensors([self.path], ["bias"])
        first[0].zero_()
        return first[0], second[0]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "m.safetensors", WEIGHTS, {"format": "pt"})


@pytest.fixture(params=["scripted", "saved and loaded", "frozen"])
def module(request, path, tmp_path):
    scripted = torch.jit.script(SelfLoading(str(path)))
    if request.param == "frozen":
        methods = ["everything", "from_files", "columns", "corners", "fill", "names", "texts", "one_by_one", "twice"]
        return torch.jit.freeze(scripted.eval(), preserved_attrs=methods)
    if request.param == "saved and loaded":
        scripted.save(str(tmp_path / "module.pt"))
        return torch.jit.load(str(tmp_path / "module.pt"))
    return scripted


def test_every_operator(module):
    for tensors in (module.everything(), module.from_files(), module.one_by_one()):
        assert list(tensors) == list(WEIGHTS)
        for name, raw in WEIGHTS.items():
            assert_same(tensors[name], raw.tensor())
    columns, rows = module.columns()
    assert_same(columns, WEIGHTS["weight"].tensor()[:, 1:3])
    assert_same(rows, WEIGHTS["bias"].tensor()[:4])
    weight, bias = (raw.tensor() for raw in WEIGHTS.values())
    for corner, expected in zip(module.corners(), (weight[::2, ::2], bias[1::3], bias[::4]), strict=True):
        assert_same(corner, expected)
    weight = torch.zeros(3, 5, dtype=torch.bfloat16).t()
    module.fill(weight)
    assert_same(weight, WEIGHTS["weight"].tensor())
    assert module.names() == list(WEIGHTS)
    assert module.texts() == {"format": "pt"}


def test_the_file_is_read_at_every_call(module, path):
    """However much the program has been optimised meanwhile."""
    x = torch.eye(3)
    for seed in range(6):
        weights = {"weight": random_raw("BF16", (5, 3), seed), "bias": random_raw("I16", (5,), seed)}
        write(path, weights)
        weight, bias = weights["weight"].tensor(), weights["bias"].tensor()
        expected = torch.nn.functional.linear(x, weight.float(), bias.float())
        torch.testing.assert_close(module(x), expected, equal_nan=True)


def test_equal_loads_are_separate_tensors(module):
    for _ in range(4):
        first, second = module.twice()
        assert not first.any()
        assert_same(second, WEIGHTS["bias"].tensor())


def test_errors_cross_the_interpreter(module, path):
    path.unlink()
    with pytest.raises(RuntimeError, match=re.escape(f"[file-not-found] {path}")):
        module.everything()


def tool(name: str) -> str:
    """A build tool of this environment, or else of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is needed to build the C++ example: pip install {name}"
    return found


@pytest.fixture(scope="session")
def example(tmp_path_factory):
    """The C++ program, built."""
    build = tmp_path_factory.mktemp("libtorch")
    configure = [tool("cmake"), "-S", EXAMPLE, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    configure += [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (configure, [tool("cmake"), "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "fst_example"


def run_example(example: Path, *arguments: object) -> list[str]:
    """Runs the C++ program without any environment in which a Python could be found."""
    library = Path(fst.__file__).with_name("libfst.so")
    done = subprocess.run([example, library, *arguments], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(name: str, tensor: torch.Tensor, kind: str) -> list[str]:
    """The words with which the C++ program shows a tensor, numbers rounded."""
    values = tensor.detach().double().flatten()
    return [name, kind, str(list(tensor.shape)), *(f"{value:.4g}" for value in (values.sum(), *values[:4]))]


def parsed(line: str) -> list[str]:
    name, kind, shape, total, first = re.fullmatch(r"(\S+) (\S+) (\[.*\]) sum (\S+) first ?(.*)", line).groups()
    return [name, kind, shape, *(f"{float(value):.4g}" for value in (total, *first.split()))]


def test_cpp_runs_a_scripted_module(example, tmp_path, python_environ):
    subprocess.run([sys.executable, EXAMPLE / "make_module.py", tmp_path], env=python_environ, check=True)
    weights = fst.load_file(tmp_path / "linear.safetensors")
    output = torch.nn.functional.linear(torch.linspace(0, 1, 8), weights["weight"], weights["bias"])
    expected = [shown("forward", output, "Float")]
    expected += [shown(name, tensor, "Float") for name, tensor in weights.items()]
    assert [parsed(line) for line in run_example(example, "run", tmp_path / "linear.pt")] == expected


def test_cpp_lists_a_checkpoint(example, tmp_path):
    kinds = {"BF16": "BFloat16", "I64": "Long", "U8": "Byte", "F64": "Double", "BOOL": "Bool"}
    tensors = {name: torch.arange(6).view(2, 3).to(DTYPES[name][0]) for name in kinds}
    raws = {name: Raw(name, (2, 3), bits_of(tensor)) for name, tensor in tensors.items()}
    path = write(tmp_path / "list.safetensors", raws)
    lines = run_example(example, "list", path)
    assert [parsed(line) for line in lines] == [shown(name, tensors[name], kind) for name, kind in kinds.items()]


def test_cpp_streams_a_checkpoint(example, tmp_path):
    tensors = {f"t{index}": torch.arange(index, dtype=torch.float64) for index in range(30)}
    path = write(
        tmp_path / "s.safetensors", {name: Raw("F64", (len(of),), bits_of(of)) for name, of in tensors.items()}
    )
    lines = run_example(example, "stream", path)
    assert [parsed(line) for line in lines] == [shown(name, tensor, "Double") for name, tensor in tensors.items()]


def test_cpp_reports_errors(example, tmp_path):
    library = Path(fst.__file__).with_name("libfst.so")
    path = tmp_path / "missing.safetensors"
    done = subprocess.run([example, library, "list", path], env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"[file-not-found] {path}" in done.stderr


def test_cpp_needs_no_python(example):
    """Neither the program nor the library is linked with a Python."""
    library = Path(fst.__file__).with_name("libfst.so")
    for binary in (example, library):
        linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in linked
        assert "python" not in re.sub(r"=> \S+|/\S+/", "", linked)


def test_the_library_is_linked_with_no_cuda_library():
    """So that one build serves PyTorch with and without CUDA."""
    library = Path(fst.__file__).with_name("libfst.so")
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert any(name.startswith("libtorch") for name in needed)
    assert not [name for name in needed if re.search(r"cuda|cufile|nv|python", name)]
