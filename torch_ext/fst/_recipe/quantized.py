"""Quantized tensors of a checkpoint, and the expressions that dequantize them, from headers and a configuration."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.checkpoint import Checkpoint
from fst._core.urls import without_secrets
from fst._recipe.general import Source, general_rules
from fst._recipe.names import quoted

# Values of "quant_method" in configurations, for which headers tell the scheme.
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp4")
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8)
_FP4_PACKED = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
# Last components of names that only quantized activations and caches have.
_ACTIVATIONS = (
    *("activation_scale", "input_scale", "input_scale_ub", "input_global_scale", "output_scale", "output_global_scale"),
    *("q_scale", "k_scale", "v_scale"),
)
# Last components of names that belong to schemes which are not known.
_UNKNOWN = ("g_idx", "qweight", "qzeros", "weight_g_idx", "weight_zero_point", "absmax", "quant_map", "SCB")
# Codes and scales among the names that an expression reads.
_PARTS = slice(0, 1), slice(1, None)
# Usual blocks of FP8 weights, if neither a configuration nor the scales tell.
_BLOCK = (128, 128)


class Dequantized(NamedTuple):
    """Tensor that is dequantized: the expression, the names that it reads, with the codes first, and its shape."""

    text: str
    reads: tuple[str, ...]
    shape: tuple[int, ...]


class Quantized(NamedTuple):
    """Quantized tensors of a checkpoint.

    Attributes:
        outputs: The dequantized tensors, by the names that they have in the plain model.
        consumed: The names of their codes and scales, and of the scales of activations.
    """

    outputs: dict[str, Dequantized]
    consumed: frozenset[str]


def dequantizing_rules(paths: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Returns the rules that dequantize an open checkpoint, and keep its other tensors.

    Raises:
        ValueError: No tensor is quantized, a scale is missing, or the scheme is not known.
    """
    names = checkpoint.names()
    stored = dict(zip(names, checkpoint.load_tensors(names, torch.device("meta")), strict=True))
    config = configuration(checkpoint)
    settings = config.get("quantization_config") or config.get("compression_config")
    try:
        found = quantized_tensors(stored, settings or {})
        if not found.outputs:
            raise ValueError("no tensor is quantized; leave out dequantize")
    except ValueError as error:
        raise ValueError(f"{without_secrets(paths[0]) if paths else ''}: {error}") from None
    by_codes = {each.reads[0]: (output, each) for output, each in found.outputs.items()}
    sources: dict[str, Source] = {}
    for name in stored:
        if name in by_codes:
            output, each = by_codes[name]
            sources[output] = Source(each.text, frozenset(each.reads))
        elif name not in found.consumed:
            sources[name] = Source(quoted(name), frozenset([name]))
    return general_rules(sources, stored)


def quantized_tensors(stored: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Quantized:
    """Finds the quantized tensors of a checkpoint.

    Args:
        stored: The tensors by name, on meta.
        settings: The `quantization_config` of the model, or an empty mapping.
    """
    method = settings.get("quant_method")
    method = getattr(method, "value", method)
    if method is not None and method not in _METHODS:
        raise ValueError(f"the quantization {method!r} is not known; {', '.join(_METHODS)} are")
    outputs: dict[str, Dequantized] = {}
    consumed: set[str] = set()
    blocks = _block(settings)
    for name, codes in stored.items():
        last = _last(name)
        if last in _UNKNOWN:
            raise ValueError(f'"{name}" belongs to a quantization that is not known')
        if last in _ACTIVATIONS:
            consumed.add(name)
            continue
        found = _dequantization(name, codes, stored, blocks, bool(settings.get("weight_block_size")))
        if found is None:
            continue
        output, expression, shape, reads = found
        outputs[output] = Dequantized(expression, tuple(reads), shape)
        consumed.update(reads)
    consumed |= {name for name in stored if _is_shape_of_packed(name, stored)}
    _check_rest({name: tensor for name, tensor in stored.items() if name not in consumed}, stored, outputs)
    return Quantized(outputs, frozenset(consumed))


def _check_rest(rest: Mapping[str, Tensor], stored: Mapping[str, Tensor], outputs: Mapping[str, Dequantized]) -> None:
    """Checks that the tensors that are not quantized are neither codes nor scales, nor named like outputs.

    Args:
        rest: The tensors that no output reads.
        stored: All tensors.
        outputs: The dequantized tensors.
    """
    of_codes, of_scales = ({_last(name) for each in outputs.values() for name in each.reads[part]} for part in _PARTS)
    for name, tensor in rest.items():
        if name in outputs:
            raise ValueError(f'"{name}" is stored, and also dequantized from "{outputs[name].reads[0]}"')
        if _is_scale(name, tensor, stored) or (_last(name) in of_scales and tensor.dim() > 1):
            raise ValueError(f'"{name}" holds scales, but the checkpoint has no codes of them; complete the checkpoint')
        # Integers may be numbers, unless their name is that of codes.
        is_integer = tensor.dtype in (torch.int8, torch.uint8)
        is_named = _last(name) in of_codes or name.endswith("_blocks")
        if tensor.dim() > 1 and (is_named if is_integer else tensor.dtype in (*_CODES, *_FP4_PACKED)):
            scales = f"{name.removesuffix('_blocks')}_scales" if name.endswith("_blocks") else f"{name}_scale_inv"
            raise ValueError(
                f'"{name}" holds {tensor.dtype} codes, but the checkpoint has no scale of it, such as "{scales}"'
            )


def _is_scale(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> bool:
    """Returns whether a tensor has the name of scales of weights. Others, such as "logit_scale", may be parameters."""
    if name.endswith(("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale")):
        return True
    if name.endswith("_scales"):
        return tensor.dtype in (torch.uint8, torch.float8_e8m0fnu) or f"{name.removesuffix('_scales')}_blocks" in stored
    return name.endswith("_scale") and name.removesuffix("_scale") in stored


def _last(name: str) -> str:
    """Returns the last component of a name."""
    return name.rpartition(".")[2]


def _is_shape_of_packed(name: str, stored: Mapping[str, Tensor]) -> bool:
    return name.endswith("weight_shape") and f"{name.removesuffix('shape')}packed" in stored


def _dequantization(
    name: str, codes: Tensor, stored: Mapping[str, Tensor], block: tuple[int, int] | None, is_block_of_all: bool
) -> tuple[str, str, tuple[int, ...], list[str]] | None:
    """Returns the output, the expression, the shape and the names of quantized codes, or `None` for other tensors."""
    shape = tuple(codes.shape)
    if name.endswith("_blocks") and (scales := f"{name.removesuffix('_blocks')}_scales") in stored and len(shape) == 4:
        experts, rows, groups, half = shape
        expression = f"permute(dequant({quoted(name)}, {quoted(scales)}, mxfp4), 0, 2, 1)"
        return name.removesuffix("_blocks"), expression, (experts, groups * half * 2, rows), [name, scales]
    if name.endswith("weight_packed"):
        weight = name.removesuffix("_packed")
        scales, factor = f"{weight}_scale", f"{weight}_global_scale"
        if codes.dtype != torch.uint8 or scales not in stored:
            raise ValueError(
                f'"{name}" holds {codes.dtype} of shape {list(shape)}: of packed weights, only MXFP4 and NVFP4 with a '
                "weight_scale are known"
            )
        reads = [name, scales, *([factor] if factor in stored else [])]
        # As compressed-tensors, unlike gpt-oss, takes the exponent 255: as infinity.
        scheme = "nvfp4_div" if factor in stored else "fp4"
        return weight, _dequant(reads, scheme), (*shape[:-1], shape[-1] * 2), reads
    is_nvfp4 = name + "_scale" in stored and stored[name + "_scale"].dtype == torch.float8_e4m3fn
    if codes.dtype == torch.uint8 and (is_nvfp4 or f"{name}_scale_2" in stored):
        reads = [name, f"{name}_scale", f"{name}_scale_2"]
        return name, _dequant(_all(reads, stored), "nvfp4"), (*shape[:-1], shape[-1] * 2), reads
    candidates = [f"{name}_scale_inv", f"{name}_scale"]
    candidates += [f"{name.removesuffix('weight')}scale"] if name.endswith(".weight") else []
    scales = next((candidate for candidate in candidates if candidate in stored), None)
    if scales is None:
        return None
    if codes.dtype in _FP4_PACKED and len(shape) > 1 and stored[scales].shape[-1:] == (shape[-1] // 16,):
        return name, _dequant([name, scales], "fp4"), (*shape[:-1], shape[-1] * 2), [name, scales]
    if codes.dtype not in _CODES:
        return None
    suffix = _block_text(name, shape, scales, tuple(stored[scales].shape), block, is_block_of_all)
    return name, _dequant([name, scales], "", suffix), shape, [name, scales]


def _dequant(names: Sequence[str], scheme: str, block: str = "") -> str:
    return f"dequant({', '.join([*map(quoted, names), *([scheme] if scheme else []), *([block] if block else [])])})"


def _all(names: list[str], stored: Mapping[str, Tensor]) -> list[str]:
    for name in names:
        if name not in stored:
            raise ValueError(f'"{names[0]}" is quantized, but the checkpoint has no "{name}"')
    return names


def _block_text(
    name: str,
    shape: tuple[int, ...],
    scales: str,
    grid: tuple[int, ...],
    block: tuple[int, int] | None,
    is_block_of_all: bool,
) -> str:
    """Returns the block of a tensor as an argument, or "" if the shape of the scales tells it."""
    if len(shape) < 2 or (math.prod(grid) == 1 and not (is_block_of_all and len(grid) > 1)):
        return ""
    rows, columns = shape[-2:]
    *_, grid_rows, grid_columns = (1, *grid)
    candidates = [block] if block else [_BLOCK]
    if not is_block_of_all:
        if (grid_rows, grid_columns) == (rows, 1) and len(grid) == len(shape):
            return ""
        # One scale for some columns of a row.
        candidates += [(1, columns // grid_columns)] if grid_rows == rows and columns % grid_columns == 0 else []
    for each in candidates:
        if each and (math.ceil(rows / each[0]), math.ceil(columns / each[1])) == (grid_rows, grid_columns):
            return f"block={each[0]}x{each[1]}"
    expected = candidates[0] or _BLOCK
    raise ValueError(
        f'"{name}" of shape {list(shape)} in blocks of {expected[0]} x {expected[1]} needs scales of shape '
        f'[{math.ceil(rows / expected[0])}, {math.ceil(columns / expected[1])}], but "{scales}" has the shape '
        f"{list(grid)}"
    )


def _block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the block in a `quantization_config`."""
    size = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, Mapping) else getattr(group, "weights", None)
        structure = weights.get("block_structure") if isinstance(weights, Mapping) else None
        size = size or (structure.split("x") if isinstance(structure, str) else structure)
    return None if not size else (int(size[0]), int(size[1]))


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the configuration in `config.json` beside the files of a checkpoint, or an empty one.

    Raises:
        ValueError: The file is not valid JSON.
    """
    found = checkpoint.text_beside("config.json")
    if found is None:
        return {}
    path, text = found
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config if isinstance(config, dict) else {}
