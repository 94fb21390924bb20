"""Examples of tensorizer's documentation, with the import changed, on local files."""

import os

import pytest
import torch

from fst.compat.tensorizer import TensorDeserializer, TensorSerializer, torch_compat, utils
from rawfile import assert_all_same
from tensorizer_helpers import tensors_of


@pytest.fixture
def transformer():
    """Saves a small GPT-J."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.GPTJConfig(vocab_size=99, n_positions=128, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    transformers.GPTJForCausalLM(config).save_pretrained("EleutherAI/gpt-j-6B")


def example_serialize(uri):
    import torch
    from transformers import AutoModelForCausalLM

    model_ref = "EleutherAI/gpt-j-6B"
    model = AutoModelForCausalLM.from_pretrained(
        model_ref,
        revision="float16",
        torch_dtype=torch.float16,
        low_cpu_mem_usage=True,
    )

    serializer = TensorSerializer(uri)
    serializer.write_module(model)
    serializer.close()
    return model


def example_deserialize(uri):
    import time

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fst.compat.tensorizer.utils import convert_bytes, get_mem_usage, no_init_or_tensor

    model_ref = "EleutherAI/gpt-j-6B"
    config = AutoConfig.from_pretrained(model_ref)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device), no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(config)

    before_mem = get_mem_usage()

    start = time.perf_counter()
    deserializer = TensorDeserializer(uri, device=device)
    deserializer.load_into_module(model)
    end = time.perf_counter()

    after_mem = get_mem_usage()

    total_bytes_str = convert_bytes(deserializer.total_tensor_bytes)
    duration = end - start
    per_second = convert_bytes(deserializer.total_tensor_bytes / duration)
    deserializer.close()
    print(f"Deserialized {total_bytes_str} in {end - start:0.2f}s, {per_second}/s")
    print(f"Memory usage before: {before_mem}")
    print(f"Memory usage after: {after_mem}")
    return model


@pytest.mark.usefixtures("transformer")
def test_example_transformers(capsys):
    saved = example_serialize("bucket/gpt-j-6B.tensors")
    model = example_deserialize("bucket/gpt-j-6B.tensors")
    assert_all_same(tensors_of(model), tensors_of(saved))
    assert {tensor.device.type for tensor in tensors_of(model).values()} == {utils.get_device().type}
    size = utils.convert_bytes(sum(tensor.nbytes for tensor in tensors_of(saved).values()))
    assert f"Deserialized {size} in" in capsys.readouterr().out
    tokens = torch.arange(9, device=model.device)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, saved.to(model.device)(tokens).logits)


def test_example_trainer(model):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from fst.compat.tensorizer.torch_compat import tensorizer_saving

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(4)]
    arguments = transformers.TrainingArguments("out", max_steps=1, save_steps=1, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=data)
    with tensorizer_saving():
        trainer.train()
    assert os.path.exists("out/checkpoint-1/optimizer.pt.tensors")
    with torch_compat.tensorizer_loading(device="cpu"):
        states = torch.load("out/checkpoint-1/optimizer.pt")["state"]
    assert_all_same(states[0], trainer.optimizer.optimizer.state_dict()["state"][0])
