"""Compares small models of all types that transformers converts, loaded and saved with and without `fst.patch()`.

    python tests/upstream/conversions.py [TYPE ...]

Prints the types whose models or files differ, were loaded tensor by tensor, or could not be built, and fails if one
differs.
"""

import argparse
import contextlib
import copy
import importlib
import logging
import re
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import transformers
from model_sizes import ARGUMENTS
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

import fst

# What the attributes of configurations are at most.
LIMITS = {
    99: "vocab_size",
    128: "max_position_embeddings",
    32: "d_model dim embed_dim hidden_size n_embd out_hidden_size output_dim projection_dim text_hidden_size",
    28: "image_size",
    24: "decoder_ffn_dim encoder_ffn_dim ffn_dim intermediate_size mlp_dim",
    16: "mamba_d_head mamba_head_dim",
    14: "patch_size",
    8: "head_dim index_head_dim kv_lora_rank linear_key_head_dim linear_value_head_dim moe_intermediate_size "
    "q_lora_rank qk_head_dim shared_expert_intermediate_size v_head_dim",
    4: "decoder_attention_heads encoder_attention_heads index_topk linear_num_value_heads mamba_d_state "
    "mamba_n_heads mamba_num_heads moe_num_experts n_head n_routed_experts num_attention_heads num_experts "
    "num_heads num_local_experts qk_nope_head_dim qk_rope_head_dim",
    2: "decoder_layers depth encoder_layers index_n_heads linear_num_key_heads moe_k moe_topk n_layer "
    "num_experts_per_tok num_hidden_layers num_key_value_heads num_layers",
    1: "first_k_dense_replace n_group topk_group",
    0: "bos_token_id eos_token_id num_nextn_predict_layers pad_token_id",
}
PARAMETERS_MAX = 60_000_000
# Layers of the models, and stages of backbones.
LAYERS = 2


class Lines(logging.Handler):
    """Keeps the reasons for which models were loaded tensor by tensor."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


# Where these limits do not fit together: limits of attributes whose names match, in their order.
COUNTS = {
    r"vocab_size$": 99,
    r"(^|_)(n_?)?(layers?|blocks?|depth)$": LAYERS,
    r"per_tok|top_?k$|moe_k$": 2,
    r"experts$": 4,
}
WIDTHS = {
    r"intermediate|ffn|mlp_dim": 48,
    r"heads$": 4,
    r"hidden_size|hidden_dim|embed_dim|d_model|width|n_embd|projection_dim": 64,
}
LISTS = re.compile("layer_types$|layers_block_type$|layers_types$")
FEATURES = re.compile("feature_layers?$")


def named(name):
    """Returns the limit of an attribute by its name."""
    return {name: limit for limit, names in LIMITS.items() for name in names.split()}.get(name)


def matched(*tables):
    patterns = [(re.compile(pattern), limit) for table in tables for pattern, limit in table.items()]
    return lambda name: next((limit for pattern, limit in patterns if pattern.search(name)), None)


# Ways to shrink a configuration, from the smallest models on: limits, and whether attributes without a value get them.
SHRINKINGS = [(named, False), (matched(COUNTS), False), (matched(COUNTS, WIDTHS), False), (named, True)]


def shrink(config, limit_of, fills):
    for name, value in vars(config).copy().items():
        if isinstance(value, PretrainedConfig):
            shrink(value, limit_of, fills)
        elif isinstance(value, list) and LISTS.search(name) and value:
            # Two layers, of two types if there are two.
            setattr(config, name, [value[0], next((kind for kind in value if kind != value[0]), value[0])])
        elif isinstance(value, list) and FEATURES.search(name) and value:
            setattr(config, name, [1, 0][: len(value)])
        elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            # Options of single layers.
            setattr(config, name, {key: option for key, option in value.items() if key < LAYERS})
        elif (limit := limit_of(name)) is None:
            continue
        elif (value is None and fills) or (type(value) is int and value > limit):
            setattr(config, name, limit)
    if "stage_names" in vars(config):
        # A backbone, whose last stage is its output.
        config.stage_names = ["stem", *(f"stage{number}" for number in range(1, LAYERS + 1))]
        config._out_features, config._out_indices = config.stage_names[-1:], [LAYERS]
    return config


def builders(config):
    """Yields functions that build a model: of the classes that transformers finds, and of all others."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        yield auto.from_config
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.config_class is type(config):
            yield kind._from_config


def configurations(kind):
    """Returns functions that make small configurations of a type."""
    make = CONFIG_MAPPING[kind]
    if kind in ARGUMENTS:
        # Configurations keep the lists that they get.
        return [lambda: make(**copy.deepcopy(ARGUMENTS[kind]))]
    return [partial(lambda *limits: shrink(make(), *limits), *limits) for limits in SHRINKINGS]


def save(kind, folder):
    """Saves a small model of a type. Returns the model, and its tensors as transformers loads them."""
    errors = []
    for make_config in configurations(kind):
        for make in builders(CONFIG_MAPPING[kind]()):
            try:
                config = make_config()
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in make(config).parameters())
                if not 0 < size <= PARAMETERS_MAX:
                    raise ValueError(f"{size} parameters")
                model = make(config)
                model.save_pretrained(folder)
                return model, load(model, folder)
            except Exception as error:
                errors.append(error)
    # Errors of classes that have no model of the type say least.
    raise next((error for error in errors if "Unrecognized configuration" not in str(error)), errors[-1])


def load(model, folder):
    # Parameters that the files lack are random.
    torch.manual_seed(0)
    return type(model).from_pretrained(folder).state_dict(keep_vars=True)


def saved(model, folder):
    """Saves a model in several files. Returns their bytes."""
    model.save_pretrained(folder, max_shard_size="100KB")
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


def is_same(actual, expected):
    # The stride of a dim with one index has no effect.
    strides = [
        [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        for tensor in (actual, expected)
    ]
    traits = [(type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in (actual, expected)]
    bits = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (actual, expected)]
    return traits[0] == traits[1] and strides[0] == strides[1] and torch.equal(*bits)


def compare(kind, log):
    """Returns the outcome for a type, and a reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, expected = save(kind, folder)
        except Exception as error:
            return "not built", repr(error)
        files = saved(model, Path(folder, "plain"))
        log.lines.clear()
        with fst.patch():
            actual, actual_files = load(model, folder), saved(model, Path(folder, "patched"))
        if actual_files != files:
            return "different", f"files: {[name for name in files if actual_files.get(name) != files[name]][:5]}"
        different = [name for name in expected if name not in actual or not is_same(actual[name], expected[name])]
        if different or actual.keys() != expected.keys():
            return "different", ", ".join(different[:5])
        return ("tensor by tensor", log.lines[0]) if log.lines else ("same", "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE")
    kinds = parser.parse_args().types or [
        kind for kind in _build_checkpoint_conversion_mapping() if kind in CONFIG_MAPPING
    ]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    log = Lines()
    logging.getLogger("fst").addHandler(log)
    logging.getLogger("fst").setLevel(logging.DEBUG)
    outcomes = Counter()
    for kind in kinds:
        with contextlib.redirect_stderr(None):
            outcome, reason = compare(kind, log)
        outcomes[outcome] += 1
        if outcome != "same":
            print(f"{kind}: {outcome}: {reason[:160]}", flush=True)
    print(f"transformers {transformers.__version__}:", ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    if outcomes["different"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
