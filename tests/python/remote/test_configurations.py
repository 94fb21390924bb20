"""Configurations of models beside remote checkpoints."""

import json

import pytest
import torch
from safetensors.torch import save

import fst
from fst_bench.http_server import Fault
from rawfile import assert_same

CODES = torch.randint(0, 127, (64, 96), dtype=torch.uint8).view(torch.float8_e4m3fn)
SCALES = torch.rand(2, 2)
FP8 = save({"q.weight": CODES, "q.weight_scale_inv": SCALES})
# 32 rows and 48 columns, as no shape tells.
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 48]}}


def put(server, config):
    server.put("model/model.safetensors", FP8)
    if config is not None:
        server.put("model/config.json", config)


@pytest.mark.parametrize("path", ["model/", "model/model.safetensors"])
def test_blocks_of_the_configuration(http_server, path):
    put(http_server, json.dumps(CONFIG).encode())
    loaded = fst.load_file(http_server.url(path), dequantize=True)
    scales = SCALES.repeat_interleave(32, 0).repeat_interleave(48, 1)
    assert_same(loaded["q.weight"], (CODES.float() * scales).bfloat16())
    assert len(http_server.requests("model/config.json")) == 1


def test_without_a_configuration(http_server):
    """The shapes alone do not tell the block, which is 128 x 128 then."""
    put(http_server, None)
    with pytest.raises(ValueError, match="in blocks of 128 x 128"):
        fst.load_file(http_server.url("model/"), dequantize=True)


def test_configurations_that_cannot_be_read(http_server):
    put(http_server, b"{")
    with pytest.raises(ValueError, match=r"/model/config\.json: Expecting"):
        fst.load_file(http_server.url("model/"), dequantize=True)
    http_server.fault("model/config.json", Fault("status", status=403))
    with pytest.raises(PermissionError, match=r"/model/config\.json"):
        fst.load_file(http_server.url("model/"), dequantize=True)


def test_recipe_of_transformers(http_server):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.core_model_loading")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    config.architectures = ["LlamaForCausalLM"]
    state = transformers.LlamaForCausalLM(config).state_dict()
    http_server.put("model/model.safetensors", save(state))
    with pytest.raises(ValueError, match=r"config\.json"):
        fst.Recipe.of_transformers(http_server.url("model/"))
    http_server.put("model/config.json", config.to_json_string().encode())
    recipe = fst.Recipe.of_transformers(http_server.url("model/"))
    assert {name: tuple(like.shape) for name, like in recipe.outputs(http_server.url("model/")).items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
