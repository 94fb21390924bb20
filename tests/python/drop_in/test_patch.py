"""`fst.patch`: unmodified programs that call safetensors use fst while the patch is active."""

import functools
import importlib
import sys
import threading
import types
from unittest import mock

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


def is_patched():
    return safetensors.safe_open is not ORIGINALS["safe_open"]


def references():
    """Returns all references of imported modules to functions of safetensors, by module and name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        for name, value in list(namespace.items()) if isinstance(namespace, dict) else ():
            if any(value is original for original in ORIGINALS.values()):
                found[module_name, name] = value
    return found


def count_tensors(function):
    """Calls a function. Returns the number of tensors that fst has loaded for it, and its result."""
    with fst.profile() as p:
        result = function()
    return p.summary().tensors, result


def test_modules_with_names_of_the_standard_library_are_patched(path, tmp_path, monkeypatch):
    """Of a package, and of one that has no file."""
    text = "from safetensors.torch import load_file\n"
    (tmp_path / "cmd").mkdir()
    for name in ("__init__.py", "loader.py"):
        (tmp_path / "cmd" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    made = types.ModuleType("profile.loader")
    exec(text, vars(made))
    with mock.patch.dict(sys.modules, {"profile.loader": made}):
        sys.modules.pop("cmd", None)
        modules = [importlib.import_module("cmd"), importlib.import_module("cmd.loader"), made]
        with fst.patch():
            for module in modules:
                assert count_tensors(lambda module=module: module.load_file(path))[0] == 2, module


def test_patch_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        fst.patch()


@pytest.mark.parametrize("load", ["load_file", "load_model", "safe_open", "numpy"])
def test_loads_use_fst(path, load):
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
            assert isinstance(file, safetensors.safe_open) or not is_patched()
            assert file.metadata() == {"format": "pt"}
            return {name: file.get_slice(name)[:] for name in file.keys()}  # noqa: SIM118

    with fst.patch():
        count, loaded = count_tensors(run)
    assert count == len(loaded)
    for name, tensor in loaded.items():
        assert_same(tensor, TENSORS[name])
    assert count_tensors(run)[0] == 0


def test_saves_use_fst(tmp_path, monkeypatch):
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


def test_errors(path, tmp_path):
    """Errors have the classes that safetensors raises. Frameworks that fst does not support are its own."""
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 20)
    with pytest.raises(Exception, match="cobol") as original:
        safetensors.safe_open(path, framework="cobol")
    with fst.patch():
        with pytest.raises(type(original.value), match="cobol") as replaced:
            safetensors.safe_open(path, framework="cobol")
        for read in (safetensors.torch.load_file, lambda path: safetensors.safe_open(path, framework="pt")):
            with pytest.raises(safetensors.SafetensorError, match="bad"):
                read(bad)
        with pytest.raises(FileNotFoundError):
            safetensors.torch.load_file(tmp_path / "none.safetensors")
        with pytest.raises(TypeError, match=r"^safe_open\.__new__\(\) missing .* 'framework'$"):
            safetensors.safe_open(path)
    assert str(replaced.value) == str(original.value)


def test_references_in_modules(path):
    """References under any name are replaced, also in modules imported while the patch is active."""
    before = types.ModuleType("bound_before")
    exec("from safetensors import safe_open as opener; from safetensors.torch import load_file as f", before.__dict__)
    sys.modules["bound_before"] = before
    try:
        everything = references()
        with fst.patch():
            assert before.opener is safetensors.safe_open is safetensors.torch.safe_open is safetensors.numpy.safe_open
            assert before.f is safetensors.torch.load_file
            assert references() == {}
            later = types.ModuleType("bound_later")
            exec("from safetensors import safe_open as opener; from safetensors.torch import save_file", later.__dict__)
            sys.modules["bound_later"] = later
            assert later.opener is safetensors.safe_open
            # References that the patch cannot find.
            kept = [safetensors.safe_open, safetensors.torch.load_file]
        later_names = {
            ("bound_later", "opener"): ORIGINALS["safe_open"],
            ("bound_later", "save_file"): ORIGINALS["save_file"],
        }
        assert references() == everything | later_names
        assert isinstance(kept[0](path, framework="pt"), ORIGINALS["safe_open"])
        assert count_tensors(lambda: kept[1](path))[0] == 0
    finally:
        for name in ("bound_before", "bound_later"):
            sys.modules.pop(name, None)


def test_replacements_by_others_during_the_patch_survive(path, monkeypatch):
    """unpatch does not undo another replacement, and the function that this one calls uses safetensors again."""
    fst.patch()
    inner = safetensors.torch.load_file

    def mine(*args):
        return inner(*args)

    with monkeypatch.context() as changes:
        changes.setattr(safetensors.torch, "load_file", mine)
        assert count_tensors(lambda: safetensors.torch.load_file(path))[0] == 2
        fst.unpatch()
        assert safetensors.torch.load_file is mine
        assert safetensors.safe_open is ORIGINALS["safe_open"]
        assert count_tensors(lambda: safetensors.torch.load_file(path))[0] == 0
        fst.patch()
        assert count_tensors(lambda: safetensors.torch.load_file(path))[0] == 2
    # The other program has ended, and has put back what it found: a replacement of fst.
    assert safetensors.torch.load_file is inner


def test_replacements_by_others_before_the_patch_are_called(path, monkeypatch):
    calls = []

    @functools.wraps(ORIGINALS["load_file"])
    def mine(*args):
        calls.append(args)
        return ORIGINALS["load_file"](*args)

    user = types.ModuleType("user_of_mine")
    user.load = mine
    with monkeypatch.context() as changes:
        changes.setattr(safetensors.torch, "load_file", mine)
        changes.setitem(sys.modules, "user_of_mine", user)
        with fst.patch():
            assert_same(safetensors.torch.load_file(path)["a"], TENSORS["a"])
            user.load(path)
            with safetensors.safe_open(path, framework="pt") as file:
                assert isinstance(file, fst.safe_open)
        assert calls == [(path,), (path,)]
        assert safetensors.torch.load_file is user.load is mine


def test_odd_modules_do_no_harm(monkeypatch):
    """Lazy modules are not imported, and objects whose attributes or comparisons fail are left alone."""

    asked = []

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            asked.append(name)

    class Names(dict):
        copy = None

    names = Names(load_file=ORIGINALS["load_file"])

    class Odd:
        __hash__ = None
        __class__ = property(lambda self: 1 / 0)
        __dict__ = property(lambda self: 1 / 0)

        def __eq__(self, other):
            raise RuntimeError("not comparable")

    values = types.ModuleType("odd_values")
    values.first, values.load_file = Odd(), ORIGINALS["load_file"]
    for index, module in enumerate([Lazy("lazy"), Odd(), type("Other", (), {"__dict__": names})(), None, 3, values]):
        monkeypatch.setitem(sys.modules, f"odd_{index}", module)
    for _ in range(2):
        with fst.patch():
            assert values.load_file is safetensors.torch.load_file is not ORIGINALS["load_file"]
        assert values.load_file is ORIGINALS["load_file"]
    assert asked == []


def test_module_that_is_replaced_between_blocks(monkeypatch):
    """The number of modules stays the same."""
    for module in (types.ModuleType("changing"), types.ModuleType("changing")):
        module.opener = ORIGINALS["safe_open"]
        monkeypatch.setitem(sys.modules, "changing", module)
        with fst.patch():
            assert module.opener is safetensors.safe_open
            module.later = safetensors.torch.load_file
        assert module.opener is ORIGINALS["safe_open"]
        assert module.later is ORIGINALS["load_file"]


def test_modules_that_import_late(monkeypatch):
    """Names that functions bind, and that lazy modules bind on access, are replaced and restored."""
    late = types.ModuleType("late")
    exec("def load(): global f; from safetensors.torch import load_file as f", vars(late))

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            value = self.__dict__[name] = getattr(safetensors, name)
            return value

    lazy = Lazy("lazy")
    monkeypatch.setitem(sys.modules, "late", late)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with fst.patch():
        pass
    late.load()
    assert lazy.safe_open is ORIGINALS["safe_open"]
    with fst.patch():
        assert late.f is safetensors.torch.load_file is not ORIGINALS["load_file"]
        assert vars(lazy)["safe_open"] is safetensors.safe_open is not ORIGINALS["safe_open"]
    assert late.f is ORIGINALS["load_file"]
    assert vars(lazy)["safe_open"] is ORIGINALS["safe_open"]
    del late.f, lazy.safe_open
    with fst.patch():
        late.load()
        assert lazy.safe_open is safetensors.safe_open
    assert late.f is ORIGINALS["load_file"]
    assert vars(lazy)["safe_open"] is ORIGINALS["safe_open"]


def test_instances_of_the_classes_of_safetensors(path, monkeypatch):
    """Objects that were created during the patch are instances of the original classes, also after it, and others of
    the replacement, which stays the same."""
    before = safetensors.safe_open(path, framework="pt")
    names = ["TensorMeta", "PySafeSlice", "PrefetchLoader"]
    for name in names:
        # Version 0.9 has them.
        if not hasattr(safetensors, name):
            monkeypatch.setattr(safetensors, name, type(name, (), {}), raising=False)
    # prefetch refuses the CPU.
    loader = fst.safe_open(path).prefetch()
    monkeypatch.setattr(fst.safe_open, "prefetch", lambda *args, **kwargs: loader)
    with fst.patch(), safetensors.safe_open(path, "pt") as file:
        found = [file, file.get_tensor_meta("a"), file.get_slice("a"), file.prefetch(device="cuda")]
        assert all(map(isinstance, found, [safetensors.safe_open, *(getattr(safetensors, name) for name in names)]))
        kept = safetensors.safe_open
        assert isinstance(before, kept)
        assert not isinstance("text", kept)
    assert isinstance(kept(path, framework="pt"), kept)
    assert all(map(isinstance, found, [safetensors.safe_open, *(getattr(safetensors, name) for name in names)]))
    assert isinstance(file, fst.safe_open)
    assert found[1].shape == found[2].get_shape() == [3, 4]


def test_calls_and_blocks(path):
    """Calls switch the patch on and off once. Blocks nest, and may be reused."""
    both = fst.patch()
    for _ in range(2):
        with both:
            inside = safetensors.safe_open
            with both, fst.patch():
                assert safetensors.safe_open is inside
            assert safetensors.safe_open is inside
            assert count_tensors(lambda: safetensors.torch.load_file(path))[0] == 2
        assert not is_patched()
        assert count_tensors(lambda: safetensors.torch.load_file(path))[0] == 0
    with pytest.raises(KeyError), fst.patch():
        raise KeyError
    assert not is_patched()
    fst.patch().__exit__()
    assert not is_patched()
    # A surplus exit ends nothing.
    with both, fst.patch():
        both.__exit__()
        both.__exit__()
        assert is_patched()
    assert not is_patched()
    fst.unpatch()
    fst.patch()
    fst.patch()
    with fst.patch():
        assert is_patched()
    assert is_patched()
    with fst.patch():
        fst.unpatch()
        assert is_patched()
    assert not is_patched()
    fst.unpatch()
    assert not is_patched()


def test_threads(path, run_threads):
    started = threading.Barrier(8)

    def work():
        started.wait()
        for _ in range(20):
            with fst.patch():
                assert is_patched()
                with safetensors.safe_open(path, framework="pt") as file:
                    assert isinstance(file, fst.safe_open)
                    assert_same(file.get_tensor("a"), TENSORS["a"])

    run_threads(work, 8)
    assert not is_patched()
