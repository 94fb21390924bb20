"""`fst.patch(device=...)`: tensors come on the devices to which programs would move them.

Without a GPU, the tests place tensors on "cpu", where each still comes from a stream, and on "meta".
"""

import pytest
import safetensors.torch
import torch

import fst
import fst._patch.placement
from rawfile import assert_same

TENSORS = {f"model.layers.{index}.weight": torch.full((4, 3), float(index)) for index in range(12)} | {
    "lm_head.weight": torch.ones(5)
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    return path


@pytest.fixture
def loaders(monkeypatch):
    """The loaders that were started: names and device of each."""
    started = []

    class Recording(fst._patch.placement.PrefetchLoader):
        def __init__(self, checkpoint, names, regions, device, window_bytes):
            started.append((names, str(device)))
            super().__init__(checkpoint, names, regions, device, window_bytes)

    monkeypatch.setattr(fst._patch.placement, "PrefetchLoader", Recording)
    return started


def test_slices_come_from_one_stream(path, loaders):
    """A program that requests all slices before the first tensor, as transformers does, gets them from one load."""
    with fst.patch(device="cpu"), safetensors.safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert slices["lm_head.weight"].get_shape() == [5]
        assert loaders == []
        for name in reversed(slices):
            assert_same(slices[name][...], TENSORS[name])
        assert loaders == [(file.offset_keys(), "cpu")]
        # A second request, and parts of tensors, are loads of their own.
        assert_same(slices["lm_head.weight"][...], TENSORS["lm_head.weight"])
        assert_same(slices["lm_head.weight"][1:3], TENSORS["lm_head.weight"][1:3])
        assert len(loaders) == 1
    # Slices stay usable.
    assert_same(slices["lm_head.weight"][...], TENSORS["lm_head.weight"])


def test_device_map(path):
    """The longest name applies. "disk", and names that are not in the map, mean the CPU."""
    devices = {"model": "meta", "model.layers.1": "cpu", "model.layers.2": "disk", "model.layers.3.weight": "cpu"}

    def device_of(name):
        return "cpu" if name.split(".")[2:3] in (["1"], ["2"], ["3"]) or name == "lm_head.weight" else "meta"

    expected = {name: device_of(name) for name in TENSORS}
    with fst.patch(device=devices):
        loads = [safetensors.torch.load_file(path)]
        with safetensors.safe_open(path, "pt") as file:
            loads.append(file.get_tensors())
            loads.append({name: file.get_tensor(name) for name in TENSORS})
            loads.append({name: file.get_slice(name)[0:] for name in TENSORS})
    for loaded in loads:
        assert {name: tensor.device.type for name, tensor in loaded.items()} == expected
        assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS if expected[name] == "cpu")


def test_requests_for_other_devices_and_frameworks_are_kept(path):
    with fst.patch(device="meta"):
        assert safetensors.torch.load_file(path, device="meta")["lm_head.weight"].is_meta
        with safetensors.safe_open(path, "np") as file:
            assert file.get_tensor("lm_head.weight").tolist() == [1.0] * 5
        with safetensors.safe_open(path, "pt") as file, pytest.raises(fst.SafetensorError, match="does not contain"):
            file.get_slice("nope")


def test_blocks_and_calls(path):
    """The block or call that was begun last counts."""

    def device():
        return safetensors.torch.load_file(path)["lm_head.weight"].device.type

    with fst.patch(device="meta"):
        assert device() == "meta"
        with fst.patch():
            assert device() == "cpu"
        assert device() == "meta"
    fst.patch(device="meta")
    with fst.patch(device="cpu"):
        assert device() == "cpu"
    assert device() == "meta"
    fst.patch()
    assert device() == "cpu"
    fst.unpatch()


def test_devices_that_do_not_exist(path):
    for device, error, message in (
        ("nope", ValueError, "nope"),
        ({"": "nope"}, ValueError, "nope"),
        (1.5, TypeError, "device must be"),
        ("auto", ValueError, "infer_auto_device_map"),
        ({"a": "balanced"}, ValueError, "infer_auto_device_map"),
    ):
        with pytest.raises(error, match=message):
            fst.patch(device=device)
    assert not isinstance(safetensors.safe_open(path, "pt"), fst.safe_open)


def test_prefetch_refuses_the_cpu(path):
    """The class under its name in safetensors refuses what safetensors refuses."""
    refused = pytest.raises(safetensors.SafetensorError, match="prefetch loads to cuda devices, not cpu")
    with fst.patch(), safetensors.safe_open(path, "pt") as file, refused:
        file.prefetch()


def test_from_pretrained(tmp_path, loaders):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, tie_word_embeddings=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    with fst.patch(device={"": "cpu"}):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    # One load for each file, of all its tensors.
    assert sorted(names for names, _ in loaders) == sorted(fst.tensor_names(path) for path in files)
    for name, tensor in model.state_dict().items():
        assert_same(loaded.state_dict()[name], tensor)
