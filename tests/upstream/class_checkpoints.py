"""Small checkpoints of classes of servers: of models of transformers, or with made-up names of tensors."""

import contextlib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import first_loads

PARAMETERS_MAX = 160_000_000

# What the attributes of a configuration are at most, by parts of their names. The first match counts.
LIMITS = {
    r"vocab_size$": 512,
    r"(^|_)(n_?)?(layers?|blocks?|depth)$": 2,
    r"per_tok|top_?k$|moe_k$": 2,
    r"^(n_group|topk_group|first_k_dense_replace)$": 1,
    r"experts$|^moe_num_experts$": 4,
    r"key_value_heads$|kv_heads$|num_key_heads$": 2,
    r"heads$|^n_head$": 4,
    r"head_dim$|_rank$": 64,
    r"intermediate|ffn|mlp_dim": 256,
    r"hidden_size|hidden_dim|embed_dim|d_model|width|n_embd|projection_dim|^dim$": 256,
    r"max_position|n_positions": 512,
    r"(bos|eos|pad)_token_id$": 1,
}
_PATTERNS = [(re.compile(pattern), limit) for pattern, limit in LIMITS.items()]
# Values of attributes that a configuration lacks.
DEFAULTS = (
    {
        r"layer_types$|layers_block_type$|layers_types$": ["full_attention", "full_attention"],
        r"(pattern|freq|sizes|layers|thetas|thresholds)_list$|_pattern$": [1, 1],
        r"^pooling$": "avg",
        r"attn_implementation": "eager",
        r"^position_embedding_type$": "absolute",
        r"^hidden_act$": "gelu_pytorch_tanh",
    }
    | LIMITS
    | {
        r"eps(ilon)?$": 1e-5,
        r"theta|rotary_emb_base|rope_base": 10000.0,
        r"act(ivation)?(_func|_fn|_function)?$": "silu",
        r"scoring_func": "softmax",
        r"scal(e|ing)|factor|multiplier|alpha": 1.0,
        r"bias|^use_|^is_|norm_|^has_|^add_|^tie_|parallel|shared|^attn_|^enable|^no_|_only$": False,
    }
)
_LISTS = re.compile("layer_types$|layers_block_type$|layers_types$")


def digests_of(load: first_loads.Load, path: Path, load_format: str) -> dict[str, str]:
    import torch

    # So are parameters that a class initializes, and that the checkpoint lacks.
    torch.manual_seed(0)
    results: list[dict[str, str]] = []

    def inspect(model: Any) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        results.append({name: first_loads.digest(tensor) for name, tensor in named if tensor.device.type != "meta"})
        raise first_loads.LoadedError

    with contextlib.suppress(first_loads.LoadedError):
        load(str(path), load_format, inspect)
    [result] = results
    return result


def saved_by_transformers(architecture: str, path: Path, load: first_loads.Load) -> str:
    """Saves a small random model of transformers."""
    import torch
    import transformers

    kind = getattr(transformers, architecture, None)
    if not hasattr(kind, "config_class"):
        raise LookupError("no class of transformers has the name")
    errors = []
    for fills in (False, True):
        try:
            torch.manual_seed(0)
            config = _shrink(kind.config_class(), fills)
            config.architectures = [architecture]
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
            if not 0 < size <= PARAMETERS_MAX:
                raise ValueError(f"{size} parameters")
            kind(config).bfloat16().save_pretrained(path)
            return "transformers"
        except Exception as error:
            errors.append(error)
    raise errors[0]


def saved_by_server(architecture: str, path: Path, load: first_loads.Load) -> str:
    """Saves the parameters of the server's own model, with the names that its `load_weights` replaces by others."""
    from safetensors.torch import save_file

    errors = []
    for config in _configs(architecture):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, default=str))
        try:
            choices = with_attributes(path, partial(_names_of_server, path, load))
        except Exception as error:
            errors.append(error)
            continue
        for tensors in choices:
            whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            save_file(whole, path / "model.safetensors")
            try:
                digests_of(load, path, "auto")
            except Exception as error:
                errors.append(error)
            else:
                return "parameters"
    raise RuntimeError("; ".join(map(repr, errors)))


def _names_of_server(path: Path, load: first_loads.Load) -> list[dict[str, Any]]:
    """Builds a server's model, and returns tensors with two choices of names."""
    found = []

    def inspect(model: Any) -> None:
        found.extend(dict(names_of_checkpoint(model, is_split)) for is_split in (True, False))
        raise first_loads.LoadedError

    with contextlib.suppress(first_loads.LoadedError):
        load(str(path), "dummy", inspect)
    return found


def names_of_checkpoint(model: Any, is_split: bool) -> Iterator[tuple[str, Any]]:
    """Yields parameters as a checkpoint has them: fused ones in parts, and experts one by one."""
    import torch

    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    packed |= getattr(model, "packed_modules_mapping", None) or {}
    experts: dict[tuple[str, int], dict[str, str]] = {}
    for parameter, weight, expert, shard in _expert_mapping(model):
        experts.setdefault((parameter, expert), {})[shard] = weight
    modules = dict(model.named_modules())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        tensor = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
        prefix, _, kind = name.rpartition(".")
        layer, _, last = prefix.rpartition(".")
        sizes = list(getattr(modules[prefix], "output_sizes", []))
        parts = packed.get(last, [])
        fused = re.search(r"(experts\.(?:routed_experts\.)?(?:w13|w2)_)(weight|bias)$", name)
        if fused and is_split and parameter.dim() == 3:
            before, weight = name[: fused.start()], fused[2]
            is_pair = fused[1].endswith("w13_")
            for expert, values in enumerate(tensor):
                mapped = experts.get((fused[1], expert)) or experts.get((fused[1] + weight, expert)) or {}
                shards = {"w1": "gate_proj", "w3": "up_proj"} if is_pair else {"w2": "down_proj"}
                for (shard, default), part in zip(shards.items(), values.chunk(len(shards)), strict=True):
                    yield (
                        _before_mapping(model, before + mapped.get(shard, f"experts.{expert}.{default}.") + weight),
                        part,
                    )
        elif is_split and len(parts) > 1 and len(parts) == len(sizes) and sum(sizes) == tensor.shape[0]:
            for part, values in zip(parts, tensor.split(sizes), strict=True):
                yield _before_mapping(model, f"{layer}.{part}.{kind}"), values
        else:
            yield _before_mapping(model, name), tensor


def _expert_mapping(model: Any) -> list[tuple[str, str, int, str]]:
    for module in model.modules():
        if hasattr(module, "get_expert_mapping"):
            try:
                return list(module.get_expert_mapping())
            except Exception:
                continue
    return []


def _before_mapping(model: Any, name: str) -> str:
    """Returns a name whose prefix the model's mapping of names replaces by the prefix of this name."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", None) or {}
    for before, after in prefixes.items():
        if after and before not in prefixes.values() and name.startswith(after):
            return before + name.removeprefix(after)
    return name


def _configs(architecture: str) -> Iterator[dict[str, Any]]:
    """Yields configurations for an architecture: of the server or of transformers, and one with common attributes."""
    import transformers

    kind = getattr(transformers, architecture, None)
    names = [kind.config_class] if hasattr(kind, "config_class") else []
    stem = re.split("For|LMHead|Model$", architecture)[0]
    names += [known for name, known in _server_configs().items() if name == f"{stem}Config"]
    for config in names:
        try:
            yield {**_shrink(config(), False).to_dict(), "architectures": [architecture]}
        except Exception:
            traceback.print_exc()
    common = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    yield {**common.to_dict(), "architectures": [architecture]}


def _server_configs() -> dict[str, Any]:
    for module in ("vllm.transformers_utils.configs", "sglang.srt.configs"):
        if module.split(".")[0] in sys.modules:
            found = importlib.import_module(module)
            names = getattr(found, "__all__", dir(found))
            return {name: getattr(found, name, None) for name in names if name.endswith("Config")}
    return {}


def _forget_configurations() -> None:
    """Empties SGLang's caches of files that it has read."""
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if name.startswith("sglang.srt.utils.hf_transformers") else ():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def with_attributes(path: Path, load: Callable[[], Any]) -> Any:
    """Calls a function, again after each attribute that a configuration lacks."""
    for _ in range(40):
        try:
            return load()
        except AttributeError as error:
            missing = re.search(r"'\w*Config' object has no attribute '(\w+)'", str(error))
            config = json.loads((path / "config.json").read_text()) if missing else {}
            if missing is None or missing[1] in config:
                raise
            name = missing[1]
            for part in [
                config,
                *(value for value in config.values() if isinstance(value, dict) and "hidden_size" in value),
            ]:
                part.setdefault(
                    name, next((value for pattern, value in DEFAULTS.items() if re.search(pattern, name)), 1)
                )
            (path / "config.json").write_text(json.dumps(config))
            _forget_configurations()
    raise RuntimeError("the configuration lacks too much")


def _shrink(config: Any, fills: bool) -> Any:
    """Makes attributes of a configuration at most their limits. With `fills`, attributes without a value get them."""
    import transformers

    for name, value in vars(config).copy().items():
        limit = next((limit for pattern, limit in _PATTERNS if pattern.search(name)), None)
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value, fills)
        elif isinstance(value, list) and _LISTS.search(name) and value:
            # Two layers, of two types if there are two.
            setattr(config, name, [value[0], next((kind for kind in value if kind != value[0]), value[0])])
        elif limit is not None and ((value is None and fills) or (type(value) is int and value > limit)):
            setattr(config, name, limit)
    return config
