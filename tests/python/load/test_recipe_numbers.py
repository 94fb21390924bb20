"""Recipes that dequantize: numbers of codes and scales, compared with PyTorch's own expressions."""

import hashlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

import fst
from fst._core.checkpoint import Checkpoint
from procfs import SLACK_BYTES, read_bytes
from rawfile import assert_all_same, assert_same, write_sparse
from saved import KEY, damage, registered
from suite import READERS

operators = torch.ops.fst
CPU = torch.device("cpu")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
GENERATOR = torch.Generator().manual_seed(1)


def codes(*shape):
    return torch.randint(0, 126, shape, generator=GENERATOR, dtype=torch.uint8).view(torch.float8_e4m3fn)


def packed(*shape):
    return torch.randint(0, 256, shape, generator=GENERATOR, dtype=torch.uint8)


def exponents(*shape):
    return torch.randint(118, 132, shape, generator=GENERATOR, dtype=torch.uint8)


def factors(*shape):
    return torch.rand(shape, generator=GENERATOR) + 0.01


TENSORS = {
    "fp8.weight": codes(10, 12),
    "fp8.weight_scale_inv": factors(3, 3),
    "rows.weight": codes(4, 6),
    "rows.weight_scale": factors(4, 1).bfloat16(),
    "all.weight": codes(4, 6),
    "all.weight_scale": factors(1),
    **{f"m.experts.{e}.up": codes(6, 8) for e in range(3)},
    **{f"m.experts.{e}.up_scale_inv": factors(2, 2) for e in range(3)},
    "oss.down_blocks": packed(2, 5, 3, 16),
    "oss.down_scales": exponents(2, 5, 3),
    "nv.weight_packed": packed(6, 16),
    "nv.weight_scale": (factors(6, 2) * 8).to(torch.float8_e4m3fn),
    "nv.weight_global_scale": torch.tensor(3.5),
    "norm.weight": factors(12).bfloat16(),
    "plain": factors(7, 9).bfloat16() - 0.5,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("numbers") / "model.safetensors"
    save_file(TENSORS, path)
    return path


def spread(scales, rows, columns, shape):
    """Repeats the scales of blocks for all numbers."""
    return scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : shape[-2], : shape[-1]]


def blocks(name, rows, columns, scale="_scale_inv"):
    stored = TENSORS[name]
    return stored.float() * spread(TENSORS[f"{name}{scale}"], rows, columns, stored.shape)


def halves(stored):
    return E2M1[torch.stack([stored & 15, stored >> 4], -1).long()].flatten(-2)


def experts():
    return torch.stack([blocks(f"m.experts.{e}.up", 4, 4) for e in range(3)])


def oss():
    scales = TENSORS["oss.down_scales"].int().repeat_interleave(32, -1) - 127
    return torch.ldexp(halves(TENSORS["oss.down_blocks"].flatten(-2)), scales)


def nv():
    return halves(TENSORS["nv.weight_packed"]) * spread(
        TENSORS["nv.weight_scale"].float() / TENSORS["nv.weight_global_scale"], 1, 16, (6, 32)
    )


CASES = {
    "x = dequant(fp8.weight, fp8.weight_scale_inv, block=4x5)": lambda: blocks("fp8.weight", 4, 5),
    "x = dequant(rows.weight, rows.weight_scale) : f32": lambda: blocks("rows.weight", 1, 6, "_scale"),
    "x = dequant(all.weight, all.weight_scale)": lambda: TENSORS["all.weight"].float() * TENSORS["all.weight_scale"],
    "x = stack(0, e, dequant({*p}.experts.{e}.up, {*p}.experts.{e}.up_scale_inv, block=4x4)) : f16": experts,
    "x = cat(1, transpose(stack(1, e, dequant(m.experts.{e}.up, m.experts.{e}.up_scale_inv, block=4x4)), 0, 2), "
    "permute(dequant(m.experts.1.up, m.experts.1.up_scale_inv, block=4x4), 1, 0))": None,
    "x = permute(dequant(oss.down_blocks, oss.down_scales, mxfp4), 0, 2, 1)": lambda: oss().transpose(1, 2),
    "x = dequant(nv.weight_packed, nv.weight_scale, nv.weight_global_scale, nvfp4_div) : f32": nv,
    "x = view(slice(dequant(nv.weight_packed, nv.weight_scale, nv.weight_global_scale, nvfp4_div), 1, 3, 28, 5), -1)": (
        lambda: nv()[:, 3:28:5].reshape(-1)
    ),
}
CASES = {rule: expected for rule, expected in CASES.items() if expected}
RESULTS = {
    rule: expected().to({"f32": torch.float32, "f16": torch.float16}.get(rule.split()[-1], torch.bfloat16)).contiguous()
    for rule, expected in CASES.items()
}


@pytest.mark.parametrize("rule", RESULTS)
def test_schemes(path, rule):
    """Numbers equal PyTorch's bit for bit, in new and in strided existing tensors, and scales are not in the result."""
    expected = RESULTS[rule]
    [output], unused = Checkpoint([str(path)]).recipe([rule])
    assert (output.shape, set(output.sources) & set(unused)) == (list(expected.shape), set())
    [loaded] = operators.load_recipe([str(path)], ["x"], [rule])
    assert_same(loaded, expected)
    [meta] = operators.load_recipe([str(path)], ["x"], [rule], "meta")
    assert (meta.shape, meta.dtype) == (loaded.shape, loaded.dtype)
    out = torch.zeros(*expected.shape[::-1], dtype=expected.dtype).permute(*reversed(range(expected.dim())))
    operators.load_recipe_into([str(path)], ["x"], [rule], [out])
    assert_same(out.contiguous(), expected)


@settings(max_examples=80)
@given(st.sampled_from(list(RESULTS)), st.data())
def test_regions(path, rule, data):
    """Regions of outputs have the numbers of the whole, also if they cut blocks or bytes."""
    expected = RESULTS[rule]
    region = []
    for size in expected.shape:
        start, step = data.draw(st.integers(0, size)), data.draw(st.integers(1, 3))
        region.append((start, data.draw(st.integers(0, len(range(start, size, step)))), step))
    [part] = Checkpoint([str(path)]).load_recipe(["x"], [rule], CPU, regions=[region])
    index = tuple(slice(start, start + length * step, step) for start, length, step in region)
    assert_same(part, expected[index].contiguous())


def test_dtype_and_rest(path):
    """`dtype` decides where no rule does, and plain weights that match the codes are left to other rules."""
    checkpoint = Checkpoint([str(path)])
    rules = [
        "{*p}.weight = dequant({*p}.weight, {*p}.weight_scale_inv, block=4x5)",
        "{*p}.half = dequant({*p}.weight, {*p}.weight_scale)",
        "else {*n} = {*n}",
    ]
    with pytest.raises(KeyError, match=r'there is "all\.weight", but not "all\.weight_scale_inv"'):
        checkpoint.recipe(rules)
    rules[:2] = [rule.replace("{*p}", name) for rule, name in zip(rules, ("fp8", "rows"), strict=False)]
    names = {output.name for output in checkpoint.recipe(rules)[0]}
    assert {"fp8.weight", "rows.half", "norm.weight"} < names
    assert "fp8.weight_scale_inv" not in names
    [loaded] = checkpoint.load_recipe(["fp8.weight"], rules, CPU, torch.float64)
    assert_same(loaded, blocks("fp8.weight", 4, 5).double())
    out = torch.zeros(4, 6, dtype=torch.float32)
    checkpoint.load_recipe_into(["rows.half"], rules, [out])
    assert_same(out, blocks("rows.weight", 1, 6, "_scale"))


REFUSALS = {
    "x = dequant(fp8.weight, fp8.weight_scale_inv, block=5x5)": "need 2 x 3 scales, but the scales have shape",
    "x = dequant(fp8.weight, fp8.weight_scale_inv)": "pass block=",
    "x = dequant(norm.weight, all.weight_scale)": "codes of F8",
    "x = dequant(nv.weight_packed, nv.weight_scale, nvfp4)": "needs a global scale",
    "x = dequant(nv.weight_packed, nv.weight_scale, nv.weight_scale, nvfp4)": "the global scale is F8_E4M3",
    "x = dequant(fp8.weight, fp8.weight_scale_inv, block=0x5)": "column 53: expected rows and columns",
    "x = dequant(fp8.weight, a, b, c)": "expected the name of a global scale, one of the schemes",
    "x = dequant(fp8.weight, fp8.scale)": 'tensor "fp8.scale"',
    "x = dequant(fp8.weight, fp8.weight_scale_inv, block=4x5) : f8_e5m2": "the numbers can be F64",
    "x = fp8.weight : bf16": "need dequant",
    "x = quant(plain, i8, row)": "the rule has two outputs",
    "x, y = view(quant(plain, i8, row), -1)": "quant is the outermost operation",
    "x, y = quant(plain, i9, row)": "column 21: the scheme",
    "x, y = quant(norm.weight, i8, row)": "has no rows and columns",
    "x, y = plain": "so the rule has one output",
    "x = stack(0, e, dequant(m.experts.{e}.up, fp8.{e}))": "no tensor has a name like",
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refusals(path, rule):
    with pytest.raises((ValueError, KeyError), match=REFUSALS[rule]):
        Checkpoint([str(path)]).recipe([rule])


def test_codes_beside_their_numbers(path):
    """Codes need their scales as outputs, too, even if a rule reads the scales for numbers."""
    read = Checkpoint([str(path)]).recipe
    numbers = "x = dequant(fp8.weight, fp8.weight_scale_inv, block=4x5)"
    read([numbers, "y = fp8.weight", "s = fp8.weight_scale_inv"])
    read([numbers, "raw y = fp8.weight"])
    with pytest.raises(ValueError, match=r'fp8\.weight_scale_inv.*reads the weight "fp8\.weight" without this scale'):
        read([numbers, "y = fp8.weight"])
    with pytest.raises(ValueError, match=r'nv\.weight_global_scale.*reads the weight "nv\.weight_packed" without'):
        read(["y = nv.weight_packed", "s = nv.weight_scale"])


def test_regions_read_only_their_codes_and_scales(tmp_path, monkeypatch):
    """A row of blocks reads its codes and scales, and a wrong grid reads nothing."""
    monkeypatch.setenv("FST_READER", "pread")
    path = str(tmp_path / "large.safetensors")
    stored, scales = codes(2048, 1024), factors(128, 64)
    save_file({"w": stored, "w_scale_inv": scales}, path)
    rules = ["x = dequant(w, w_scale_inv, block=16x16)"]
    checkpoint = Checkpoint([path])
    before = read_bytes()
    [part] = checkpoint.load_recipe(["x"], rules, CPU, regions=[[(90, 20, 1), (100, 800, 1)]])
    assert read_bytes() - before < SLACK_BYTES + (64 << 10)
    expected = (stored.float() * spread(scales, 16, 16, stored.shape)).bfloat16()
    assert_same(part, expected[90:110, 100:900].contiguous())
    before = read_bytes()
    with pytest.raises(ValueError, match="scales"):
        checkpoint.load_recipe(["x"], [rules[0].replace("16x16", "8x16")], CPU)
    assert read_bytes() - before < SLACK_BYTES


@pytest.mark.parametrize("reader", READERS)
def test_verified_and_encrypted_files(tmp_path, reader, monkeypatch):
    """Digests cover codes, scales and other parts, whose damage leaves existing tensors as they are."""
    monkeypatch.setenv("FST_READER", reader)
    tensors = {"w": codes(64, 48), "w_scale_inv": factors(4, 3), "n": factors(64, 16).bfloat16()}
    rules = ["x = cat(1, dequant(w, w_scale_inv, block=16x16), n)"]
    numbers = (tensors["w"].float() * spread(tensors["w_scale_inv"], 16, 16, (64, 48))).bfloat16()
    expected = torch.cat([numbers, tensors["n"]], 1)
    fst.save_file(tensors, tmp_path / "secret.safetensors", encryption_key=KEY)
    with registered(KEY):
        assert_same(operators.load_recipe([str(tmp_path / "secret.safetensors")], ["x"], rules)[0], expected)
    for damaged in (None, *tensors):
        path = tmp_path / f"{damaged}.safetensors"
        fst.save_file(tensors, path, digests="blake3")
        out = torch.zeros(64, 64, dtype=torch.bfloat16)
        if damaged is None:
            operators.load_recipe_into([str(path)], ["x"], rules, [out], verify="digests")
            assert_same(out, expected)
            assert_same(operators.load_recipe([str(path)], ["x"], rules, verify="digests")[0], expected)
            continue
        damage(path, damaged)
        with pytest.raises(ValueError, match=f'"{damaged}".*blake3'):
            operators.load_recipe([str(path)], ["x"], rules, verify="digests")
        with pytest.raises(ValueError, match=f'"{damaged}".*blake3'):
            operators.load_recipe_into([str(path)], ["x"], rules, [out], verify="digests")
        assert not out.any()


QUANTIZED = {
    "c, s = quant(plain, f8e4m3, row)": (lambda: TENSORS["plain"], "f8e4m3", [1, 0]),
    "c, s = quant(transpose(plain, 0, 1), i8, tensor)": (lambda: TENSORS["plain"].t(), "i8", [0, 0]),
    "c, s = quant(dequant(fp8.weight, fp8.weight_scale_inv, block=4x5), f8e5m2, block=3x7)": (
        lambda: blocks("fp8.weight", 4, 5),
        "f8e5m2",
        [3, 7],
    ),
}


@pytest.mark.parametrize("rule", QUANTIZED)
def test_codes_and_scales(path, rule):
    """Codes and scales, and regions of them, equal the results of `fst.quantize`."""
    tensor, scheme, block = QUANTIZED[rule]
    expected = fst.quantize(tensor(), scheme, block=block)
    checkpoint = Checkpoint([str(path)])
    outputs, _ = checkpoint.recipe([rule])
    assert [output.shape for output in outputs] == [list(part.shape) for part in expected]
    # `dtype` casts no scales.
    for loaded, part in zip(checkpoint.load_recipe(["c", "s"], [rule], CPU, torch.bfloat16), expected, strict=True):
        assert_same(loaded, part)
    region = [(0, (size + 1) // 2, 2) for size in expected[0].shape]
    [part] = checkpoint.load_recipe(["c"], [rule], CPU, regions=[region])
    assert_same(part, expected[0][::2, ::2].contiguous())
    out = [torch.zeros_like(part.t()).t() for part in expected[::-1]]
    operators.load_recipe_into([str(path)], ["s", "c"], [rule], out)
    for found, part in zip(out[::-1], expected, strict=True):
        assert_same(found.contiguous(), part)


def test_quantization_in_steps(tmp_path, monkeypatch):
    """Several steps give the codes and scales of the whole tensor, and a region reads its rows only."""
    monkeypatch.setenv("FST_READER", "pread")
    path = str(tmp_path / "large.safetensors")
    generator = torch.Generator().manual_seed(5)
    plain = torch.randn(1100, 4096, generator=generator, dtype=torch.bfloat16)
    save_file({"w": plain}, path)
    checkpoint = Checkpoint([path])
    rules = ["c, s = quant(w, i8, row)"]
    expected = fst.quantize(plain, "i8")
    out = [torch.zeros(4096, 1100, dtype=torch.int8).t(), torch.zeros(1100, 2)[:, ::2]]
    operators.load_recipe_into([path], ["c", "s"], rules, out)
    for found, part in zip(out, expected, strict=True):
        assert_same(found.contiguous(), part)
    before = read_bytes()
    [scales] = checkpoint.load_recipe(["s"], rules, CPU, regions=[[(1010, 20, 3), (0, 1, 1)]])
    assert read_bytes() - before < plain[1010:1070].nbytes + SLACK_BYTES
    assert_same(scales, expected[1][1010:1070:3].contiguous())


@pytest.mark.parametrize("rule", ["c, s = quant(w, i8, row)", "c = dequant(q, s)"])
def test_files_with_one_digest_are_compared_before_numbers_are_computed(tmp_path, rule):
    path = tmp_path / "digest.safetensors"
    save_file({"w": torch.randn(8, 4), "q": codes(8, 4), "s": factors(8, 1)}, path)
    manifest = {path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}
    recipe = [rule, "kept = w"]
    assert_all_same(fst.load_file(path, verify=manifest, recipe=recipe), fst.load_file(path, recipe=recipe))
    damage(path, "w")
    with pytest.raises(fst.IntegrityError, match=r"digest.safetensors: byte 0: the digest of the file is"):
        fst.load_file(path, verify=manifest, recipe=recipe)


def test_peak_memory_of_quantization(tmp_path, fork_python):
    """A load to codes holds some rows of the numbers."""
    path = write_sparse(tmp_path / "large.safetensors", "F64", (4096, 4096))
    program = """
import sys, fst
from procfs import peak_mib
rules = ["c, s = quant(w, f8e4m3, row)"]
fst.load_file(sys.argv[1], recipe=rules, device="meta")
loaded = {}
print(peak_mib(lambda: loaded.update(fst.load_file(sys.argv[1], recipe=rules))))
"""
    assert int(fork_python(program, str(path), FST_READER="pread")) < 16 + 96
