"""The option `recipe` of all loads, and recipes as values."""

import copy
import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import fst
from fst._checkpoint.outputs import OutputLoader
from rawfile import assert_all_same, assert_same

TENSORS = {
    f"layers.{layer}.experts.{e}.{kind}.weight": torch.randn(4, 6)
    for layer in range(2)
    for e in range(3)
    for kind in ("gate", "up")
} | {"q": torch.randn(6, 4).bfloat16()}
EXPERTS = "stack(0, e, layers.{k}.experts.{e}.%s.weight)"
RULES = [f"model.{{k}}.gate_up = cat(1, {EXPERTS % 'gate'}, {EXPERTS % 'up'})", "q = slice(q, 0, 0, 2)"]
RECIPE = fst.Recipe(RULES)
OUTPUTS = {
    f"model.{layer}.gate_up": torch.cat(
        [
            torch.stack([TENSORS[f"layers.{layer}.experts.{e}.{kind}.weight"] for e in range(3)])
            for kind in ("gate", "up")
        ],
        1,
    )
    for layer in range(2)
} | {"q": TENSORS["q"][:2]}
HALF = {"model.*": torch.float16}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    fst.save_file(TENSORS, path, digests="blake3")
    return path


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Parameter(torch.zeros(2, 4))
        self.model = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for module in self.model:
            module.gate_up = torch.nn.Parameter(torch.zeros(3, 8, 6))


def test_recipes_are_values():
    assert pickle.loads(pickle.dumps(RECIPE)) == copy.deepcopy(RECIPE) == RECIPE
    assert {RECIPE: 1}[fst.Recipe(tuple(RULES))] == 1
    assert fst.Recipe(RULES[1:]) != RECIPE != RULES
    assert eval(repr(RECIPE), {"Recipe": fst.Recipe}) == RECIPE
    with pytest.raises(AttributeError, match="does not change"):
        RECIPE.rules = ()
    with pytest.raises(TypeError, match="pass \\[rules\\]"):
        fst.Recipe("q = q")
    with pytest.raises(ValueError, match="needs a rule"):
        fst.Recipe([])
    with pytest.raises(ValueError, match="rule 2, column 5"):
        fst.Recipe(["q = q", "x = glue(q)"])


def test_outputs_come_from_headers(path):
    outputs = RECIPE.outputs(path)
    assert all(tensor.is_meta for tensor in outputs.values())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in outputs.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in OUTPUTS.items()
    }


def streamed(path, **options):
    with fst.stream(path, recipe=RECIPE, **options) as stream:
        loaded = dict(stream)
        assert stream.total_bytes == sum(tensor.nbytes for tensor in loaded.values())
    assert list(loaded) == list(OUTPUTS)
    return loaded


def sliced(path):
    with fst.safe_open(path, recipe=RULES) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: (part.get_shape(), part[..., 1:].shape[-1] + 1) for name, part in parts.items()} == {
            name: ([*tensor.shape], tensor.shape[-1]) for name, tensor in OUTPUTS.items()
        }
        return {name: torch.cat([part[..., :1], part[..., 1:]], -1) for name, part in parts.items()}


def sharded(path, load):
    with_placements = load(path, {"q": Shard(0), "*": Replicate()}, recipe=RECIPE)
    return dict(with_placements)


def into(path):
    out = [torch.zeros_like(tensor) for tensor in OUTPUTS.values()]
    fst.load_into(path, [*OUTPUTS], out, recipe=RECIPE, verify=True)
    return dict(zip(OUTPUTS, out, strict=True))


def module(path):
    model = Model()
    address = model.q.data_ptr()
    fst.load_module(model, path, recipe=RECIPE)
    assert model.q.data_ptr() == address
    return {name: tensor.detach().to(OUTPUTS[name].dtype) for name, tensor in model.state_dict().items()}


def updated(path):
    target = {name: torch.zeros_like(tensor) for name, tensor in OUTPUTS.items()}
    fst.prepare_update(target, path, recipe=RECIPE).commit()
    return target


LOADS = {
    "load_file": lambda path: fst.load_file(path, recipe=RECIPE),
    "rules": lambda path: fst.load_file(path, recipe=RULES),
    "verified": lambda path: fst.load_file(path, recipe=RECIPE, verify=True),
    "progress": lambda path: fst.load_file(path, recipe=RECIPE, progress=True),
    "load_tensors": lambda path: dict(zip(OUTPUTS, fst.load_tensors(path, [*OUTPUTS], recipe=RECIPE), strict=True)),
    "stream": streamed,
    "stream one by one": lambda path: streamed(path, window_bytes=1),
    "stream ready": lambda path: streamed(path, window_bytes=1000, order="ready"),
    "safe_open": sliced,
    "load_into": into,
    "load_module": module,
    "prepare_update": updated,
    "load_sharded": lambda path: sharded(path, fst.load_sharded),
    "stream_sharded": lambda path: sharded(path, fst.stream_sharded),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_loads(path, load):
    assert_all_same(load(path), OUTPUTS)


def test_dtypes_slices_and_repeated_names_are_those_of_outputs(path):
    expected = {name: tensor.half() if name != "q" else tensor for name, tensor in OUTPUTS.items()}
    assert_all_same(fst.load_file(path, recipe=RECIPE, dtype=HALF), expected)
    assert_all_same(streamed(path, dtype=HALF), expected)
    with torch.device("meta"):
        model = Model()
    fst.load_module(model, path, recipe=RECIPE, dtype=torch.float16)
    assert_same(model.q.detach(), OUTPUTS["q"].half())
    [columns, row] = fst.load_slices(path, ["q", "model.1.gate_up"], [-1, 0], [1, 2], [3, 1], recipe=RECIPE)
    assert_same(columns, OUTPUTS["q"][:, 1:].contiguous())
    assert_same(row, OUTPUTS["model.1.gate_up"][2:])
    with fst.stream(path, names=["q", "model.0.gate_up", "q"], recipe=RECIPE, window_bytes=64) as stream:
        assert [name for name, _ in stream] == ["model.0.gate_up", "q", "q"]


def test_compiled_programs_load_outputs(path):
    def load():
        return fst.load_tensors(str(path), ["q"], recipe=RECIPE, dtype=torch.float32)

    [loaded] = torch.compile(load, backend="eager", fullgraph=True)()
    assert_same(loaded, OUTPUTS["q"].float())
    with pytest.raises(Exception, match=r"pass recipe=fst\.Recipe\.dequantizing"):
        torch.compile(lambda: fst.load_tensors(str(path), ["q"], dequantize=True), backend="eager", fullgraph=True)()


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_errors_of_rules_and_files(tmp_path, load):
    """A checkpoint lacks what the first rule reads."""
    path = tmp_path / "other.safetensors"
    fst.save_file({"q": torch.ones(6, 4)}, path, digests="blake3")
    with pytest.raises((KeyError, ValueError), match=r"other\.safetensors.*rule 1|rule 1.*layers"):
        load(path)


def test_refusals(path, tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        fst.load_file(path, recipe=RULES, dequantize=True)
    with pytest.raises(KeyError, match='"p": the recipe has no such output'):
        fst.load_tensors(path, ["p"], recipe=RECIPE)
    with pytest.raises(ValueError, match="no tensor is quantized"):
        fst.load_file(path, dequantize=True)
    changed = TENSORS | {"q": TENSORS["q"] + 1}
    fst.save_delta(TENSORS, changed, tmp_path / "delta", version="1", base_version="0")
    target = {name: tensor.clone() for name, tensor in TENSORS.items()}
    fst.set_version([*target.values()], "0")
    with pytest.raises(ValueError, match="is a delta, to which recipe and dequantize do not apply"):
        fst.prepare_update(target, tmp_path / "delta", recipe=["q = q"])


def test_a_stream_ends_early_and_repeats_its_error(path, tmp_path):
    with fst.stream(path, recipe=RECIPE, window_bytes=1) as stream:
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_outputs_on_a_gpu_load_ahead_on_their_own_stream(monkeypatch):
    """The caller's stream waits for the copies of a batch, and not for those of the next one."""
    log, local = [], threading.local()
    is_loaded = [threading.Event() for _ in range(3)]
    side, device = SimpleNamespace(device=torch.device("cuda", 1)), torch.device("cuda", 1)
    current = SimpleNamespace(wait_stream=lambda stream: log.append(("wait", stream is side)))

    @contextmanager
    def stream(used):
        local.stream = used
        yield
        local.stream = None

    class Made:
        """Outputs on a GPU, whose memory holds one of them at first."""

        is_full = True

        def load(self, names, regions, device, **_):
            if device.type == "meta":
                return [torch.empty(4, device="meta") for _ in names]
            [number] = map(int, names)
            if number == 1 and self.is_full:
                self.is_full = False
                raise torch.OutOfMemoryError("memory is full")
            log.append(("load", number, device, local.stream is side))
            is_loaded[number].set()
            return [SimpleNamespace(record_stream=lambda stream: log.append(("use", number, stream is current)))]

    for name, value in {
        "is_available": lambda: True,
        "Stream": lambda _: side,
        "stream": stream,
        "current_stream": lambda _: current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    loader = OutputLoader(Made(), [(number, str(number)) for number in range(3)], None, "cuda", 40, {})
    returned = []
    for number in (0, 2):
        # Before it is requested. The one between does not fit, and is loaded again when it is requested.
        assert is_loaded[number].wait(60)
        returned.append(loader.next_batch()[0])
        if number == 0:
            returned.append(loader.next_batch()[0])
    assert returned == [[0], [1], [2]]
    assert log == [
        step for number in range(3) for step in [("load", number, device, True), ("wait", True), ("use", number, True)]
    ]
    assert loader.next_batch() == ([], [], [])
