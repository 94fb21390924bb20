"""Loads of recipes: outputs that rules make of stored tensors, compared with PyTorch's own operations."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

import fst
from fst._core.checkpoint import Checkpoint
from procfs import SLACK_BYTES, read_bytes
from rawfile import assert_same

operators = torch.ops.fst
CPU = torch.device("cpu")


def numbered(*shape, dtype=torch.float32):
    """Returns a tensor whose elements differ from each other, as far as the dtype permits."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)


TENSORS = {
    **{
        f"layers.0.experts.{e}.{kind}.weight": numbered(4, 6) + 100 * e + len(kind)
        for e in range(12)
        for kind in ("up", "gate")
    },
    **{f"layers.{k}.q": numbered(8, 4, dtype=torch.bfloat16) + k for k in range(2)},
    "a.b.c": numbered(3, 5),
    "a.b.d": numbered(3, 5) + 50,
    "odd, name = {x}": numbered(6),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "codes": numbered(4, 4).to(torch.uint8),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "model.safetensors"
    save_file(TENSORS, path)
    return path


def interleaved(x):
    return x.view(2, 4, 4).transpose(0, 1).reshape(8, 4)


CASES = {
    "renamed = a.b.c": lambda t: t["a.b.c"],
    "short.c = {*p}.c": lambda t: t["a.b.c"],
    "half = a.b.c : bf16": lambda t: t["a.b.c"].bfloat16(),
    'kept = "odd, name = {{x}}"': lambda t: t["odd, name = {x}"],
    "s = scalar": lambda t: t["scalar"],
    "s2 = view(scalar, 1, 1)": lambda t: t["scalar"].view(1, 1),
    "none = cat(0, empty, empty)": lambda t: t["empty"],
    "layers.0.up = stack(0, e, layers.0.experts.{e}.up.weight)": lambda t: torch.stack(
        [t[f"layers.0.experts.{e}.up.weight"] for e in range(12)]
    ),
    "layers.{k}.gate_up = cat(1, stack(0, e, layers.{k}.experts.{e}.gate.weight), "
    "stack(0, e, layers.{k}.experts.{e}.up.weight)) : F16": lambda t: torch.cat(
        [torch.stack([t[f"layers.0.experts.{e}.{kind}.weight"] for e in range(12)]) for kind in ("gate", "up")], 1
    ).half(),
    "last = stack(-1, e, transpose(layers.0.experts.{e}.up.weight, 0, 1))": lambda t: torch.stack(
        [t[f"layers.0.experts.{e}.up.weight"].t() for e in range(12)], -1
    ),
    "rope = view(permute(view(layers.1.q, 2, 4, 4), 1, 0, 2), 8, 4)": lambda t: interleaved(t["layers.1.q"]),
    "flat = view(permute(cat(0, a.b.c, a.b.d), 1, 0), 30)": lambda t: (
        torch.cat([t["a.b.c"], t["a.b.d"]]).t().reshape(30)
    ),
    "every = slice(view(cat(1, a.b.c, a.b.d), 30), 0, 1, -1, 3)": lambda t: torch.cat([t["a.b.c"], t["a.b.d"]], 1).view(
        30
    )[1:-1:3],
    "row = narrow(a.b.d, 0, -1, 1)": lambda t: t["a.b.d"][-1:],
    "raw = codes": lambda t: t["codes"],
}


@pytest.mark.parametrize("rule", CASES)
def test_operations(path, rule):
    """Loads into new and strided existing tensors, and regions, equal PyTorch's operations bit for bit."""
    expected = CASES[rule](TENSORS).contiguous()
    checkpoint = Checkpoint([str(path)])
    [output], _ = checkpoint.recipe([rule])
    assert output.shape == list(expected.shape)
    [loaded] = operators.load_recipe([str(path)], [output.name], [rule])
    assert_same(loaded, expected)
    assert not loaded._is_view()
    [meta] = operators.load_recipe([str(path)], [output.name], [rule], "meta")
    assert (meta.shape, meta.dtype, meta.stride()) == (loaded.shape, loaded.dtype, loaded.stride())
    out = torch.full((*expected.shape, 2), 7, dtype=expected.dtype)[..., 0]
    operators.load_recipe_into([str(path)], [output.name], [rule], [out])
    assert_same(out.contiguous(), expected)
    every_second = [(min(1, size), len(range(min(1, size), size, 2)), 2) for size in expected.shape]
    if expected.dim():
        [part] = checkpoint.load_recipe([output.name], [rule], CPU, regions=[every_second])
        assert_same(part, expected[tuple(slice(1, None, 2) for _ in expected.shape)].contiguous())


@st.composite
def expressions(draw, depth=4):
    """Returns the text of an expression and its tensor."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(["a.b.c", "a.b.d", "layers.0.experts.3.up.weight"]))
        return name, TENSORS[name]
    text, x = draw(expressions(depth - 1))
    dim = draw(st.integers(-x.dim(), x.dim() - 1)) if x.dim() else 0
    kind = draw(st.sampled_from(["slice", "permute", "view", "cat", "stack"]))
    if kind == "cat" and x.dim():
        return f"cat({dim}, {text}, {text})", torch.cat([x, x], dim)
    if kind == "slice" and x.dim():
        start = draw(st.integers(0, x.shape[dim]))
        end, step = draw(st.integers(start, x.shape[dim])), draw(st.integers(1, 3))
        index = [slice(None)] * x.dim()
        index[dim] = slice(start, end, step)
        return f"slice({text}, {dim}, {start}, {end}, {step})", x[tuple(index)]
    if kind == "permute" and x.dim():
        order = draw(st.permutations(range(x.dim())))
        return f"permute({text}, {', '.join(map(str, order))})", x.permute(order)
    if kind == "view":
        sizes, left = [], x.numel()
        while left > 1 and draw(st.booleans()):
            sizes.append(draw(st.sampled_from([size for size in range(1, min(left, 12) + 1) if left % size == 0])))
            left //= sizes[-1]
        sizes.append(left)
        return f"view({text}, {', '.join(map(str, sizes))})", x.reshape(sizes)
    return text, x


@settings(max_examples=60)
@given(expressions(), st.data())
def test_random_expressions(path, expression, data):
    """Chains of operations and random regions of their results equal PyTorch's."""
    text, expected = expression
    region = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size))
        step = data.draw(st.integers(1, 3))
        region.append((start, data.draw(st.integers(0, len(range(start, size, step)))), step))
    checkpoint = Checkpoint([str(path)])
    [whole] = checkpoint.load_recipe(["out"], [f"out = {text}"], CPU)
    assert_same(whole, expected.contiguous())
    if region:
        [part] = checkpoint.load_recipe(["out"], [f"out = {text}"], CPU, regions=[region])
        index = tuple(slice(start, start + length * step, step) for start, length, step in region)
        assert_same(part, expected[index].contiguous())


FAULTS = {
    "a = b = c": "rule 1, column 7: expected the end",
    "a = cat(0)": "column 5: cat needs a tensor",
    "a = stack(0, e, x.{e}": r"column 22: expected `\)`",
    "a = glue(a.b.c)": "column 5: there is no operation",
    "a = view(a.b.c, 4)": r"column 5: a tensor of shape \[3, 5\] cannot be viewed as \[4\]",
    "a = permute(a.b.c, 0, 0)": "each of them once",
    "a = slice(a.b.c, 2, 0, 1)": "dimension 2 of a tensor with 2 dimensions",
    "a = slice(a.b.c, 1, 0, 6)": "do not lie inside dimension 1, whose size is 5",
    "a.{k} = a.b.c": "the variable {k} of the output does not occur",
    "{k}{l} = a": "one variable at most",
    "x = {a": "expected a variable",
    "x = a.b.c : int7": "is not a dtype to cast to",
    "x = codes : bf16": "need dequant and their scales",
    "x = cat(0, a.b.c, layers.0.q)": r"must be equal",
    "x = cat(0, view(a.b.c, 15), view(layers.0.q, 32))": "have the dtypes F32 and BF16",
    "x = a.b.x": r'"a.b.x": .*nearest names are "a.b.[cd]".*rule 1, column 5',
    "x.{k} = q.{k}": r'column 9: no tensor has a name like "q.\*"',
    "{p} = layers.{p}.q\n": None,
    "x = {*p}.q": "has this output, too",
    "{k}.x = cat(0, layers.{k}.q, layers.{k}.experts.0.up.weight)": 'there is "layers.1.q", but not',
}


@pytest.mark.parametrize("rule", FAULTS)
def test_wrong_rules(path, rule):
    """Errors name the rule and the column."""
    call = lambda: Checkpoint([str(path)]).recipe([rule])  # noqa: E731
    if FAULTS[rule] is None:
        assert [output.name for output in call()[0]] == ["0", "1"]
        return
    with pytest.raises((ValueError, KeyError), match=FAULTS[rule]):
        call()


def test_stack_with_holes(tmp_path):
    path = tmp_path / "holes.safetensors"
    save_file({f"e.{number}.w": numbered(2) for number in (0, 1, 3, 6)}, path)
    with pytest.raises(KeyError, match="run from 0 to 6, but 3 of them are missing: 2, 4, 5"):
        Checkpoint([str(path)]).recipe(["x = stack(0, e, e.{e}.w)"])


def test_rest_unused_and_scales(tmp_path):
    """`else` takes what others leave, unread names are listed, and a scale without its weight's rule is an error."""
    path = str(tmp_path / "model.safetensors")
    save_file(
        {"p.weight": numbered(4).to(torch.float8_e4m3fn), "p.weight_scale_inv": numbered(1), "norm": numbered(3)}, path
    )
    checkpoint = Checkpoint([path])
    outputs, unused = checkpoint.recipe(["n = norm"])
    assert ([output.name for output in outputs], sorted(unused)) == (["n"], ["p.weight", "p.weight_scale_inv"])
    outputs, unused = checkpoint.recipe(["n = norm", "else m.{*n} = {*n}"], strict=True)
    assert {output.name: output.sources for output in outputs} == {
        "n": ["norm"],
        "m.p.weight": ["p.weight"],
        "m.p.weight_scale_inv": ["p.weight_scale_inv"],
    }
    assert unused == []
    with pytest.raises(ValueError, match=r"model.safetensors: tensor \"p.weight_scale_inv\": .*without this scale"):
        checkpoint.recipe(["w = p.weight"])
    assert len(checkpoint.recipe(["raw w = p.weight"])[0]) == 1
    with pytest.raises(ValueError, match="no rule reads the tensor, nor 1 others"):
        checkpoint.recipe(["n = norm"], strict=True)
    with pytest.raises(KeyError, match='has no such output among its 1; the nearest outputs are "norm2"'):
        checkpoint.load_recipe(["norm"], ["norm2 = norm"], CPU)


def test_whole_tensors_stay_mapped_and_others_read_only_their_bytes(tmp_path):
    path = str(tmp_path / "large.safetensors")
    tensors = {name: torch.randn(512, 1024) for name in ("a", "b", "c")}
    save_file(tensors, path)
    rules = ["x.{k} = {k}", "y = cat(1, a, b)"]
    checkpoint = Checkpoint([path])
    before = read_bytes()
    mapped = checkpoint.load_recipe(["x.a", "x.b", "x.c"], rules, CPU)
    assert read_bytes() - before < SLACK_BYTES
    assert all(torch.classes.fst.Memory.is_mapped(tensor) for tensor in mapped)
    before = read_bytes()
    [part] = checkpoint.load_recipe(["y"], rules, CPU, regions=[[(3, 8, 1), (1000, 48, 1)]])
    assert read_bytes() - before < SLACK_BYTES + (64 << 10)
    assert_same(part, torch.cat([tensors["a"], tensors["b"]], 1)[3:11, 1000:1048].contiguous())


def test_dtypes(path):
    """`dtype` casts castable outputs whose rules state no dtype."""
    rules = ["plain = a.b.c", "stated = a.b.d : f64", "codes = codes"]
    names = ["plain", "stated", "codes"]
    loaded = fst._core.loads.OperatorLoads([str(path)]).load_recipe(
        names, rules, CPU, {"plain": torch.bfloat16, "*": torch.float16}
    )
    assert [tensor.dtype for tensor in loaded] == [torch.bfloat16, torch.float64, torch.uint8]
    out = [torch.empty(3, 5, dtype=torch.float64), torch.empty(3, 5, dtype=torch.bfloat16)]
    Checkpoint([str(path)]).load_recipe_into(names[:2], rules, out)
    assert_same(out[0], TENSORS["a.b.c"].double())
    assert_same(out[1], TENSORS["a.b.d"].bfloat16())
    with pytest.raises(ValueError, match="which must be equal"):
        operators.load_recipe_into([str(path)], names[:1], rules, out[:1])
