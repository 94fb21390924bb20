"""The option `dequantize`: rules from headers and configurations, values of each scheme, and refusals."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

import fst
from rawfile import assert_all_same

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def codes(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def packed(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def numbers(packed_codes):
    """Returns the numbers of two 4-bit floats a byte, the low nibble first."""
    return E2M1[torch.stack([packed_codes & 15, packed_codes >> 4], -1).long().flatten(-2)]


def spread(scales, shape, rows, columns):
    """Returns a scale for each element of a matrix in blocks, of which the last ones may be smaller."""
    grid = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return grid[..., : shape[-2], : shape[-1]]


def power(exponents):
    return torch.exp2(exponents.float() - 127)


def fp8_blocks():
    weight, scales = codes(200, 300), torch.rand(2, 3)
    expected = weight.float() * spread(scales, weight.shape, 128, 128)
    return {"l.0.q.weight": weight, "l.0.q.weight_scale_inv": scales}, FP8, {"l.0.q.weight": expected}


def fp8_rows():
    weight, scales = codes(8, 6), torch.rand(8, 1).bfloat16()
    stored = {"q.weight": weight, "q.weight_scale": scales, "q.input_scale": torch.ones(1)}
    return stored, {"quant_method": "compressed-tensors"}, {"q.weight": weight.float() * scales.float()}


def fp8_tensor():
    weight, scale = codes(8, 6).to(torch.float8_e5m2), torch.tensor(0.3)
    stored = {"q.weight": weight, "q.weight_scale": scale, "a.k_scale": torch.ones(()), "a.v_scale": torch.ones(())}
    return stored, {"quant_method": "modelopt"}, {"q.weight": weight.float() * scale}


def int8_channels():
    weight, scales = torch.randint(-127, 128, (8, 6), dtype=torch.int8), torch.rand(8, 1)
    stored = {"q.weight": weight, "q.weight_scale": scales}
    return stored, {"quant_method": "compressed-tensors"}, {"q.weight": weight.float() * scales}


def mxfp4_gpt_oss():
    blocks, scales = packed(2, 8, 3, 16), torch.randint(120, 132, (2, 8, 3), dtype=torch.uint8)
    values = numbers(blocks) * power(scales)[..., None]
    expected = values.flatten(-2).transpose(1, 2).contiguous()
    stored = {
        "e.down_proj_blocks": blocks,
        "e.down_proj_scales": scales,
        "e.down_proj_bias": torch.ones(2, 6).bfloat16(),
    }
    kept = {"e.down_proj_bias": stored["e.down_proj_bias"]}
    return stored, {"quant_method": "mxfp4"}, {"e.down_proj": expected} | kept


def mxfp4_compressed():
    weight, scales = packed(8, 32), torch.randint(120, 132, (8, 2), dtype=torch.uint8)
    stored = {"q.weight_packed": weight, "q.weight_scale": scales, "q.weight_shape": torch.tensor([8, 64])}
    expected = numbers(weight) * spread(power(scales), (8, 64), 1, 32)
    return stored, {"quant_method": "compressed-tensors"}, {"q.weight": expected}


def nvfp4_compressed():
    weight, scales, factor = packed(8, 32), torch.rand(8, 4).to(torch.float8_e4m3fn), torch.tensor([300.0])
    stored = {
        "q.weight_packed": weight,
        "q.weight_scale": scales,
        "q.weight_global_scale": factor,
        "q.input_global_scale": torch.ones(1),
    }
    expected = numbers(weight) * spread(scales.float() / factor, (8, 64), 1, 16)
    return stored, {"quant_method": "compressed-tensors"}, {"q.weight": expected}


def nvfp4_modelopt():
    weight, scales, factor = packed(8, 32), torch.rand(8, 4).to(torch.float8_e4m3fn), torch.tensor(0.01)
    stored = {"q.weight": weight, "q.weight_scale": scales, "q.weight_scale_2": factor, "q.input_scale": torch.ones(())}
    return (
        stored,
        {"quant_method": "modelopt"},
        {"q.weight": numbers(weight) * spread(scales.float() * factor, (8, 64), 1, 16)},
    )


SCHEMES = [
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    int8_channels,
    mxfp4_gpt_oss,
    mxfp4_compressed,
    nvfp4_compressed,
    nvfp4_modelopt,
]


def write(folder, stored, settings):
    save_file(stored, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.__name__)
def test_schemes(tmp_path, scheme):
    """Each number is rounded once, and only the scales are left out."""
    torch.manual_seed(0)
    stored, settings, expected = scheme()
    norm = torch.ones(3)
    write(tmp_path, stored | {"norm.weight": norm}, settings)
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_all_same(fst.load_file(tmp_path, dequantize=True), rounded | {"norm.weight": norm})
    recipe = fst.Recipe.dequantizing(tmp_path)
    with fst.safe_open(tmp_path / "model.safetensors", recipe=recipe) as file:
        for name, tensor in rounded.items():
            assert file.get_slice(name)[1:, 1:].equal(tensor[1:, 1:])
    (tmp_path / "config.json").unlink()
    with fst.stream(tmp_path, dequantize=True, window_bytes=1) as stream:
        assert_all_same(dict(stream), rounded | {"norm.weight": norm})


def test_layers_share_rules(tmp_path):
    """A rule serves all layers and experts that are quantized alike. Others have their own."""
    stored = {"l.0.gate.weight": torch.ones(2, 2), "l.3.gate.weight": torch.ones(2, 2)}
    for layer, expert in [(layer, expert) for layer in (1, 2) for expert in range(3)]:
        stored[f"l.{layer}.e.{expert}.weight"] = codes(4, 4)
        stored[f"l.{layer}.e.{expert}.weight_scale_inv"] = torch.rand(1, 1)
    stored["l.0.e.0.weight"] = torch.ones(4, 4)
    write(tmp_path, stored, FP8)
    rules = fst.Recipe.dequantizing(tmp_path).rules
    assert len(rules) < 10
    loaded = fst.load_file(tmp_path, dequantize=True, dtype=torch.float16)
    assert loaded.keys() == {name for name in stored if not name.endswith("_inv")}
    assert loaded["l.2.e.1.weight"].dtype is torch.float16


QUANTIZED = {"q.weight": codes(4, 4), "q.weight_scale_inv": torch.ones(1, 1)}
REFUSALS = {
    "missing scale": ({"q.weight": codes(4, 4)}, FP8, r'"q.weight" holds .*float8_e4m3fn codes, but .* no scale'),
    "wrong grid": (
        {"q.weight": codes(300, 4), "q.weight_scale_inv": torch.ones(2, 1)},
        FP8,
        r'needs scales of shape \[3, 1\], but "q.weight_scale_inv" has the shape \[2, 1\]',
    ),
    "method": ({"q.weight": torch.ones(2)}, {"quant_method": "gptq"}, "the quantization 'gptq' is not known"),
    "names": ({"q.qweight": torch.ones(2)}, None, '"q.qweight" belongs to a quantization that is not known'),
    "int4": (
        {"q.weight_packed": torch.ones(2, 2, dtype=torch.int32), "q.weight_scale": torch.ones(2, 1)},
        {"quant_method": "compressed-tensors"},
        "of packed weights, only MXFP4 and NVFP4",
    ),
    "half of NVFP4": (
        {"q.weight": packed(2, 8), "q.weight_scale_2": torch.ones(())},
        None,
        'is quantized, but the checkpoint has no "q.weight_scale"',
    ),
    "NVFP4 without its global scale": (
        {"q.weight": packed(2, 8), "q.weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn)},
        None,
        'is quantized, but the checkpoint has no "q.weight_scale_2"',
    ),
    "blocks without scales": (QUANTIZED | {"e.up_blocks": packed(2, 8, 3, 16)}, None, 'no scale .* "e.up_scales"'),
    "scales without blocks": (QUANTIZED | {"e.up_scales": packed(2, 8, 3)}, None, '"e.up_scales" holds scales, but'),
    "integers without scales": (
        QUANTIZED | {"w.weight": packed(4, 4).view(torch.int8)},
        None,
        '"w.weight" holds .*int8',
    ),
    "4-bit floats without scales": (
        QUANTIZED | {"w.up": packed(4, 4).view(torch.float4_e2m1fn_x2)},
        None,
        '"w.up" holds .*float4',
    ),
    "scales of a plain weight": (
        QUANTIZED | {"w.weight": torch.ones(4, 4), "w.weight_scale_inv": torch.ones(1, 1)},
        None,
        '"w.weight_scale_inv" holds scales, but',
    ),
    "two scales": (QUANTIZED | {"q.weight_scale": torch.ones(1, 1)}, None, '"q.weight_scale" holds scales, but'),
    "two tensors of one name": (
        {"q.weight_packed": packed(8, 32), "q.weight_scale": packed(8, 2), "q.weight": torch.ones(8, 64)},
        None,
        '"q.weight" is stored, and also dequantized from "q.weight_packed"',
    ),
    "one scale in place of blocks": (
        {"q.weight": codes(256, 256), "q.weight_scale_inv": torch.ones(1, 1)},
        FP8,
        r"needs scales of shape \[2, 2\]",
    ),
    "rows in place of blocks": (
        {"q.weight": codes(256, 256), "q.weight_scale_inv": torch.ones(256, 1)},
        FP8,
        r"needs scales of shape \[2, 2\]",
    ),
    "plain": ({"q.weight": torch.ones(2)}, None, "no tensor is quantized; leave out dequantize"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path, case):
    stored, settings, message = REFUSALS[case]
    write(tmp_path, stored, settings)
    with pytest.raises(ValueError, match=message):
        fst.load_file(tmp_path, dequantize=True)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        fst.Recipe.dequantizing(tmp_path)


def test_broken_configuration(tmp_path):
    write(tmp_path, {"q.weight": torch.ones(2)}, None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        fst.load_file(tmp_path, dequantize=True)
