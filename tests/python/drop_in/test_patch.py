"""Programs that call safetensors, unchanged: they go through fst while it is patched, and only then."""

import sys
import threading
import types

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import fst
from rawfile import assert_same

ORIGINALS = {
    "safe_open": safetensors.safe_open,
    "load_file": safetensors.torch.load_file,
    "save_file": safetensors.torch.save_file,
}
TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def always_restored():
    yield
    fst.unpatch()
    assert safetensors.safe_open is ORIGINALS["safe_open"]
    assert safetensors.torch.load_file is ORIGINALS["load_file"]
    assert safetensors.torch.save_file is ORIGINALS["save_file"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    ORIGINALS["save_file"](TENSORS, path, metadata={"format": "pt"})
    return path


def patched():
    return safetensors.safe_open is not ORIGINALS["safe_open"]


def bound():
    """Everything of safetensors that any module has, by module and name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        for name, value in list(namespace.items()) if isinstance(namespace, dict) else ():
            if any(value is original for original in ORIGINALS.values()):
                found[module_name, name] = value
    return found


def tensors_of(function):
    """How many tensors fst brought while a function ran, by its own account, and what the function returned."""
    with fst.profile() as p:
        result = function()
    return p.summary().tensors, result


@pytest.mark.parametrize("load", ["load_file", "load_model", "safe_open", "numpy"])
def test_what_is_loaded(path, load):
    def run():
        if load == "load_file":
            return safetensors.torch.load_file(path)
        if load == "load_model":
            module = torch.nn.Module()
            for name, tensor in TENSORS.items():
                module.register_buffer(name, torch.zeros_like(tensor))
            assert safetensors.torch.load_model(module, path) == (set(), [])
            return module.state_dict()
        if load == "numpy":
            with safetensors.safe_open(path, framework="np") as file:
                return {"a": torch.from_numpy(file.get_tensor("a").copy())}
        with safetensors.safe_open(path, framework="pt") as file:
            assert isinstance(file, safetensors.safe_open) or not patched()
            assert file.metadata() == {"format": "pt"}
            return {name: file.get_slice(name)[:] for name in file.keys()}  # noqa: SIM118

    with fst.patch():
        count, loaded = tensors_of(run)
    assert count == len(loaded)
    for name, tensor in loaded.items():
        assert_same(tensor, TENSORS[name])
    assert tensors_of(run)[0] == 0


def test_what_is_saved(tmp_path, monkeypatch):
    import fst.torch

    saved = []
    monkeypatch.setattr(
        fst.torch,
        "save_file",
        lambda *args, save=fst.torch.save_file, **kwargs: (saved.append(args), save(*args, **kwargs)),
    )
    module = torch.nn.Linear(3, 4)
    paths = [tmp_path / f"{index}.safetensors" for index in range(3)]
    with fst.patch():
        safetensors.torch.save_file(module.state_dict(), paths[0], metadata={"format": "pt"})
        safetensors.torch.save_model(module, str(paths[1]), metadata={"format": "pt"})
    assert len(saved) == 2
    safetensors.torch.save_file(module.state_dict(), paths[2], metadata={"format": "pt"})
    assert len(saved) == 2
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()


def test_what_fst_lacks_is_left_to_safetensors(path):
    """Other frameworks, whose packages are not needed to be told so."""
    with pytest.raises(Exception) as original:  # noqa: PT011
        safetensors.safe_open(path, framework="cobol")
    with fst.patch(), pytest.raises(type(original.value), match="cobol") as replaced:
        safetensors.safe_open(path, framework="cobol")
    assert str(replaced.value) == str(original.value)


def test_errors(tmp_path):
    """What programs expect of safetensors."""
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 20)
    with fst.patch():
        with pytest.raises(safetensors.SafetensorError, match="bad"):
            safetensors.torch.load_file(bad)
        with pytest.raises(safetensors.SafetensorError, match="bad"):
            safetensors.safe_open(bad, framework="pt")
        with pytest.raises(FileNotFoundError):
            safetensors.torch.load_file(tmp_path / "none.safetensors")


def test_names_that_modules_have(path):
    """Under whatever name, and also in modules that are imported while it is patched."""
    before = types.ModuleType("bound_before")
    exec("from safetensors import safe_open as opener; from safetensors.torch import load_file as f", before.__dict__)
    sys.modules["bound_before"] = before
    try:
        everything = bound()
        with fst.patch():
            assert before.opener is safetensors.safe_open is safetensors.torch.safe_open is safetensors.numpy.safe_open
            assert before.f is safetensors.torch.load_file
            assert bound() == {}
            later = types.ModuleType("bound_later")
            exec("from safetensors import safe_open as opener; from safetensors.torch import save_file", later.__dict__)
            sys.modules["bound_later"] = later
            assert later.opener is safetensors.safe_open
            # Kept where nobody looks.
            kept = [safetensors.safe_open, safetensors.torch.load_file]
        later_names = {
            ("bound_later", "opener"): ORIGINALS["safe_open"],
            ("bound_later", "save_file"): ORIGINALS["save_file"],
        }
        assert bound() == everything | later_names
        assert isinstance(kept[0](path, framework="pt"), ORIGINALS["safe_open"])
        assert tensors_of(lambda: kept[1](path))[0] == 0
    finally:
        for name in ("bound_before", "bound_later"):
            sys.modules.pop(name, None)


def test_what_others_put_there_stays():
    """Another who replaces the same function meanwhile is not undone."""
    fst.patch()
    mine = object()
    safetensors.torch.load_file = mine
    fst.unpatch()
    try:
        assert safetensors.torch.load_file is mine
        assert safetensors.safe_open is ORIGINALS["safe_open"]
    finally:
        safetensors.torch.load_file = ORIGINALS["load_file"]


def test_modules_that_load_when_asked_are_not_asked():
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"asked for {name}")

    sys.modules["lazy_one"] = Lazy("lazy_one")
    sys.modules["no_module"] = 3
    try:
        with fst.patch():
            assert patched()
    finally:
        del sys.modules["lazy_one"], sys.modules["no_module"]


def test_blocks_nest():
    with fst.patch():
        inside = safetensors.safe_open
        with fst.patch():
            assert safetensors.safe_open is inside
        assert safetensors.safe_open is inside
    assert not patched()
    with pytest.raises(KeyError), fst.patch():
        raise KeyError
    assert not patched()


def test_one_object_for_several_blocks():
    both = fst.patch()
    with both:
        with both:
            assert patched()
        assert patched()
    assert not patched()
    with both:
        assert patched()
    assert not patched()


def test_calls():
    """A call is a switch, however often it is made; a block is a block."""
    fst.unpatch()
    fst.patch()
    fst.patch()
    assert patched()
    with fst.patch():
        assert patched()
    assert patched()
    with fst.patch():
        fst.unpatch()
        assert patched()
    assert not patched()
    fst.unpatch()
    assert not patched()


def test_it_can_be_repeated(path):
    for _ in range(3):
        with fst.patch():
            assert tensors_of(lambda: safetensors.torch.load_file(path))[0] == 2
        assert tensors_of(lambda: safetensors.torch.load_file(path))[0] == 0


def test_threads(path, run_threads):
    started = threading.Barrier(8)

    def work():
        started.wait()
        for _ in range(20):
            with fst.patch():
                assert patched()
                with safetensors.safe_open(path, framework="pt") as file:
                    assert isinstance(file, fst.safe_open)
                    assert_same(file.get_tensor("a"), TENSORS["a"])

    run_threads(work, 8)
    assert not patched()


def test_without_safetensors(run_python):
    """The error says what is missing, and nothing is half done."""
    run_python("""
import sys
sys.modules["safetensors"] = None
import fst
for _ in range(2):
    try:
        fst.patch()
    except ImportError as error:
        assert "safetensors" in str(error)
    else:
        raise SystemExit("no error")
fst.unpatch()
""")


def test_importing_fst_changes_nothing(run_python):
    run_python("""
import sys, torch
import fst
assert not {"transformers", "safetensors.torch", "fst.torch"} & sys.modules.keys()
""")
