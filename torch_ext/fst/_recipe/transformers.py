"""Rules of transformers' models, recorded from transformers' own conversion of the names and shapes in a checkpoint."""

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fst._core.checkpoint import Checkpoint
from fst._core.urls import is_remote, without_secrets
from fst._recipe.expression import Expression
from fst._recipe.general import Source, general_rules
from fst._recipe.names import quoted
from fst._recipe.quantized import Quantized, configuration, quantized_tensors


def transformers_rules(source: Any) -> list[str]:
    """Returns the rules for a directory or URL of a checkpoint, or for a configuration of a model.

    Runs transformers' conversion on tensors that record it. Nothing is read but headers and the configuration.

    Raises:
        ImportError: transformers is not installed, or has not the functions of its releases 5.20 to 5.24.
        ValueError: There is no model for the configuration, or it has a conversion that recipes do not have.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        modeling: Any = importlib.import_module("transformers.modeling_utils")
        convert, config_class = loading.convert_and_load_state_dict_in_model, modeling.LoadStateDictConfig
        find_mapping, revert = mapping.get_model_conversion_mapping, loading.revert_weight_conversion
    except (ImportError, AttributeError) as error:
        raise ImportError(f"rules of a model need transformers 5.20 to 5.24: {error}") from error
    checkpoint = Checkpoint([os.fspath(source)]) if isinstance(source, (str, os.PathLike)) else None
    config = source if checkpoint is None else _config(transformers, os.fspath(source), checkpoint)
    model = _model(transformers, config)
    if checkpoint is not None:
        leaves = _leaves(checkpoint, config)
    else:
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "the configuration is quantized; pass the directory of the checkpoint, which has the scales"
            )
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        leaves = {
            name: Expression(quoted(name), tensor, frozenset([name])) for name, tensor in revert(model, state).items()
        }
    with _quiet(transformers):
        info, _ = convert(model, dict(leaves), config_class(weight_mapping=find_mapping(model)), None)
    for target, message in info.conversion_errors.items():
        found = re.search(r"ExpressionError: (.*)", str(message))
        reason = found[1] if found else str(message).strip().splitlines()[-1]
        raise ValueError(f'"{target}" of {type(model).__name__}: {reason}; write rules for this model')
    for name, found, expected in info.mismatched_keys:
        raise ValueError(
            f'"{name}" of {type(model).__name__}: the checkpoint gives the shape {list(found)}, but the configuration '
            f"{list(expected)}"
        )
    sources: dict[str, Source] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, Expression):
            sources[name] = Source(tensor.text, tensor.reads)
    return general_rules(sources, {name for leaf in leaves.values() for name in leaf.reads})


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hides the progress bar of a load, since nothing is loaded."""
    logging = transformers.utils.logging
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def _config(transformers: Any, path: str, checkpoint: Checkpoint) -> Any:
    """Returns the configuration beside a checkpoint."""
    if not is_remote(path):
        return transformers.AutoConfig.from_pretrained(path)
    values = configuration(checkpoint)
    if not values:
        raise ValueError(f"{without_secrets(path)}: it has no config.json beside it; pass a configuration")
    with TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(values, file)
        return transformers.AutoConfig.from_pretrained(folder)


def _model(transformers: Any, config: Any) -> Any:
    """Returns the model of a configuration, on meta."""
    kinds = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel]
    errors = []
    with torch.device("meta"):
        for kind in kinds:
            if kind is not None:
                return kind(config)
        for auto in autos:
            try:
                return auto.from_config(config)
            except ValueError as error:
                errors.append(error)
    raise ValueError(f"transformers has no model for a {type(config).__name__}: {errors[-1]}")


def _leaves(checkpoint: Checkpoint, config: Any) -> Mapping[str, Expression]:
    """Returns the tensors of a checkpoint, with quantized ones dequantized."""
    names = checkpoint.names()
    stored = dict(zip(names, checkpoint.load_tensors(names, torch.device("meta")), strict=True))
    quantization = getattr(config, "quantization_config", None)
    settings = None if quantization is None else quantization if isinstance(quantization, dict) else vars(quantization)
    quantized = Quantized({}, frozenset()) if settings is None else quantized_tensors(stored, settings)
    leaves = {
        name: Expression(quoted(name), tensor, frozenset([name]))
        for name, tensor in stored.items()
        if name not in quantized.consumed
    }
    for name, made in quantized.outputs.items():
        leaves[name] = Expression(
            made.text, torch.empty(made.shape, dtype=torch.bfloat16, device="meta"), frozenset(made.reads)
        )
    return leaves
