"""Import direction between the Rust modules, and places where calls and files may be."""

import re
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from suite import CHECKOUT, cycle_of, require_gpu

RUST = CHECKOUT / "rust"
# `rust/tch` is a crate of its own, on top of the operators.
SOURCES = sorted(path for path in RUST.rglob("*.rs") if not path.is_relative_to(RUST / "tch"))
CXX_SOURCES = sorted(path for path in (CHECKOUT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu"})
SUFFIXES = {".py", ".rs", ".toml", ".txt", ".cpp", ".h", ".cu"}
# Lines of all files of a folder with these suffixes.
MAX_LINES = {"rust": 49_500, "csrc": 7_300, "torch_ext": 25_550, "tests": 54_750, "benches": 10_050}
CXX_LINES_MAX = 5_720
# Functions between Rust and C++, operators, and methods of script classes.
BORDER_MAX = (99, 33, 64)
PYTHON_SOURCES = sorted((CHECKOUT / "torch_ext").rglob("*.py"))


def modules_in_order():
    """The modules in lib.rs. A module that a feature replaces counts once."""
    return list(dict.fromkeys(re.findall(r"^(?:pub )?mod (\w+);", (RUST / "lib.rs").read_text(), re.MULTILINE)))


def paths_in(text):
    """The paths in a file that begin with `crate` or `super`, as tuples. Paths in braces are written out."""
    while group := re.search(r"((?:\w+::)+)\{([^{}]*)\}", text):
        paths = [group[1] + item.strip() for item in group[2].split(",")]
        text = text[: group.start()] + ", ".join(paths) + text[group.end() :]
    return {tuple(path.split("::")) for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", text)}


def module_of(source):
    path = source.relative_to(RUST).with_suffix("").parts
    return () if path == ("lib",) else path


def used_files(source, modules):
    """The modules with files of their own that a file names, but not its parents and children."""
    own = module_of(source)
    code = re.sub(r"//.*", "", source.read_text())
    used = set()
    for begin, *rest in paths_in(code):
        parents = [begin, *rest].count("super")
        path = rest if begin == "crate" else [*own[: len(own) - parents], *rest[parents - 1 :]]
        used.add(next(file for end in range(len(path), -1, -1) if (file := tuple(path[:end])) in modules))
    return {file for file in used if own[: len(file)] != file and file[: len(own)] != own}


def test_every_module_has_its_file():
    modules = modules_in_order()
    assert modules
    assert {path.relative_to(RUST).parts[0].removesuffix(".rs") for path in SOURCES} == {*modules, "lib"}


def test_modules_use_only_those_before_them():
    modules = modules_in_order()
    offenders = []
    found = set()
    for source in SOURCES:
        own = source.relative_to(RUST).parts[0].removesuffix(".rs")
        later = [] if own == "lib" else modules[modules.index(own) + 1 :]
        used = {path[1] for path in paths_in(source.read_text()) if path[0] == "crate"}
        offenders += [f"{source.relative_to(RUST)} uses {name}" for name in used & {*later}]
        found |= used
    assert offenders == []
    assert len(found & {*modules}) > len(modules) / 2


def test_no_files_import_each_other():
    """Parents and children may: traits are in parents."""
    modules = {module_of(source) for source in SOURCES}
    used = {module_of(source): used_files(source, modules) for source in SOURCES}
    assert cycle_of(used) == []
    assert sum(map(len, used.values())) > len(SOURCES)
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "c", "b", "a"]


def naming(pattern, sources):
    return [str(path.relative_to(CHECKOUT)) for path in sources if re.search(pattern, path.read_text())]


def test_library_has_no_tests():
    """Cargo.toml turns them off, so that cargo compiles the library once: they would not run."""
    assert naming(r"#\[(test|cfg\(test\))\]", SOURCES) == []


def test_environment_is_read_in_one_place():
    """`fst doctor` reports the variables, and obeys none. Variables of other libraries are read in `fst.compat`."""
    sources = {*SOURCES, *CXX_SOURCES, *PYTHON_SOURCES} - {CHECKOUT / "torch_ext" / "fst" / "cli" / "doctor.py"}
    assert sorted(naming(r"\benv::vars?(_os)?\b|getenv|environ\b", sources)) == [
        "rust/options.rs",
        "torch_ext/fst/compat/_environment.py",
    ]


def test_addresses_of_tensors_are_checked():
    """Only one file takes addresses of tensors, after it has checked that they have memory."""
    # The class of Rust programs is in a library of its own, and copies a tensor that serialize has returned.
    exempt = {"memory.cpp", "tch.cpp"}
    taken = re.compile(r"(?<!storage\(\)\.)\b(?:const_|mutable_)?data_ptr(?:<\w+>)?\(\)")
    found = [path.name for path in CXX_SOURCES if path.name not in exempt and taken.search(path.read_text())]
    assert found == []


def test_locks_of_the_process_are_replaced_in_a_forked_child():
    """A lock in a static or thread-local variable stays locked in a child that is forked while a thread holds it."""
    lock = r"(Mutex|RwLock|Condvar|Once|OnceLock|LazyLock|Barrier)\b"
    statics = [
        f"{path.relative_to(CHECKOUT)}: {declared}"
        for path in SOURCES
        for declared in re.findall(r"^\s*(?:pub(?:\(.*?\))? )?static \w+: .*", path.read_text(), re.MULTILINE)
        if re.search(lock, declared) and "PerProcess<" not in declared
    ]
    assert statics == []
    # C++ initializes a static variable of a function under a lock, unless the value is known to the compiler.
    headers = [*CXX_SOURCES, *(CHECKOUT / "torch_ext" / "fst" / "include").rglob("*.h")]
    assert naming(r"\n +static (?!constexpr\b)[^()\n]*=|std::call_once|\bstatic std::(\w+_)?mutex", headers) == []


def test_cuda_is_called_in_one_module():
    named = naming(r"\bcudarc\b", SOURCES)
    assert named
    assert all(path.startswith("rust/device/cuda") for path in named)
    assert naming(r"cuda_runtime|cuda\.h|CUDAStream|CUDAGuard|\bcu[A-Z]\w+\(", CXX_SOURCES) == []


def test_operators_are_bound_in_one_room():
    core = CHECKOUT / "torch_ext" / "fst" / "_core"
    # Backticks: docstrings name the operators that users call.
    named = naming(r"(?<!`)torch\.(ops|classes)\.fst\b", PYTHON_SOURCES)
    assert named
    assert all(CHECKOUT / path in core.iterdir() for path in named)


def test_cxx_has_no_python_and_no_threads():
    """The core schedules."""
    assert naming(r"Python\.h|pybind|py::|std::(jthread|thread|condition_variable|async)\b", CXX_SOURCES) == []


def test_no_units_of_cxx_include_each_other():
    """A unit is a header with its source."""
    included: dict[str, set[str]] = {}
    for path in CXX_SOURCES:
        headers = re.findall(r'^#include "(?:\w+/)*(\w+)\.h"', path.read_text(), re.MULTILINE)
        included.setdefault(path.stem, set()).update(set(headers) - {path.stem})
    assert cycle_of(included) == []
    assert "tensors" in included["load"]


def test_cxx_is_thin():
    """It only converts between the types of PyTorch and the core. Kernels, and what serves tch, do not count."""
    thin = [path for path in CXX_SOURCES if path.parent.name != "kernels" and path.stem != "tch"]
    assert sum(len(path.read_text().splitlines()) for path in thin) <= CXX_LINES_MAX


def test_border_is_narrow():
    functions = (RUST / "bridge.rs").read_text().partition('extern "Rust"')[2]
    operators, classes = ((CHECKOUT / "csrc" / name).read_text() for name in ("ops.cpp", "classes.cpp"))
    counts = (
        len(re.findall(r"\bfn \w+", functions)),
        len(re.findall(r'^ *(?:m\.def|def_io|def_load)\(\s*"', operators, re.MULTILINE)),
        len(re.findall(r"^ *\.def(?:_static)?\(", classes, re.MULTILINE)),
    )
    assert all(0 < count <= most for count, most in zip(counts, BORDER_MAX, strict=True)), counts


def test_top_level_has_few_files():
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    names = {path.split("/")[0] for path in done.stdout.splitlines()}
    assert len(names) <= 31, sorted(names)


@pytest.mark.parametrize("folder", MAX_LINES)
def test_folders_are_within_their_budgets(folder):
    files = [path for path in (CHECKOUT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert files
    assert sum(len(path.read_text().splitlines()) for path in files) <= MAX_LINES[folder]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_tests_do_not_pass_without_a_gpu(monkeypatch):
    item = SimpleNamespace(get_closest_marker=lambda name: name == "gpu")
    with pytest.raises(pytest.skip.Exception):
        require_gpu(item)
    monkeypatch.setenv("FST_REQUIRE_GPU", "1")
    with pytest.raises(pytest.fail.Exception, match="FST_REQUIRE_GPU"):
        require_gpu(item)


def test_names_of_test_files_are_unique():
    """pytest imports them without their folders."""
    names = Counter(path.name for path in (CHECKOUT / "tests" / "python").rglob("test_*.py"))
    assert max(names.values()) == 1, names.most_common(3)
