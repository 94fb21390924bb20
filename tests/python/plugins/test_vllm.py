"""vLLM with `--load-format fst`: against a stub of its interface, and against vLLM if it is installed."""

import json
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fst
from rawfile import assert_all_same
from serving import (
    TOGETHER,
    check_entry_point,
    check_gpu,
    check_weights,
    group_of_ranks,
    imports_anew,
    run_engine,
    save_checkpoint,
    save_model,
    weights,
)

MIB = 1 << 20


@pytest.fixture(params=["stub", "real"])
def vllm(request, monkeypatch):
    """Names of vLLM and of the registered plugin that the tests use."""
    if request.param == "real":
        pytest.importorskip("vllm.model_executor.model_loader", exc_type=ImportError)
    with imports_anew("vllm", stub=request.param == "stub"):
        from vllm.config.load import LoadConfig
        from vllm.model_executor import model_loader

        import fst.plugins.vllm as plugin

        with suppress(ImportError):
            from vllm.distributed.weight_transfer import WeightTransferEngineFactory

            # Other tests have registered the engine.
            monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
        plugin.register()
        yield SimpleNamespace(
            plugin=plugin,
            config=LoadConfig,
            model_loader=model_loader,
            loader=lambda **options: model_loader.get_model_loader(LoadConfig(load_format="fst", **options)),
            source=lambda path, prefix="": model_loader.DefaultModelLoader.Source(str(path), None, prefix=prefix),
        )


# Tests of behaviour that only vLLM has, or only the stub.
REAL = pytest.mark.parametrize("vllm", ["real"], indirect=True)
STUB = pytest.mark.parametrize("vllm", ["stub"], indirect=True)


def test_weights(vllm, tmp_path):
    check_weights(vllm, tmp_path)


def test_registration(vllm, caplog):
    check_entry_point("vllm.general_plugins", vllm.plugin.register)
    vllm.plugin.register()
    assert type(vllm.loader()) is vllm.plugin.FstModelLoader
    assert isinstance(vllm.loader(), vllm.model_loader.DefaultModelLoader)
    assert "overwritten" not in caplog.text
    with pytest.raises(ValueError, match="must be an object, not list"):
        vllm.plugin.FstModelLoader(SimpleNamespace(model_loader_extra_config=[]))


def test_options_reach_the_stream(vllm, tmp_path, monkeypatch):
    save_checkpoint(tmp_path)
    extra = {"window_bytes": 1000, "order": "ready", "device": "cpu"}
    config = vllm.config(load_format="fst", model_loader_extra_config=dict(extra))
    stream = mock.Mock(wraps=fst.stream)
    monkeypatch.setattr(fst, "stream", stream)
    assert len(weights(vllm.model_loader.get_model_loader(config), vllm.source(tmp_path))) == 10
    stream.assert_called_once_with(mock.ANY, torch.device("cpu"), None, window_bytes=1000, order="ready")
    assert (config.load_format, config.model_loader_extra_config) == ("fst", extra)


def test_invalid_options(vllm):
    names = "window_bytes, order, device, ranks"
    for extra, message in [
        ({"windows": 1}, f"unknown option in the extra config: 'windows'; the options are {names}"),
        ({"num_threads": 8}, "'num_threads'"),
        ({"window_bytes": 0}, "window_bytes is 0, but must be at least 1"),
        ({"window_bytes": True}, "not True"),
        ({"window_bytes": "lots"}, "'lots' is not a size"),
        ({"order": "name"}, "order must be one of"),
        ({"device": "cuda:1"}, "device must be one of"),
        ({"ranks": 2}, "ranks must be one of"),
        ({"ranks": "together", "order": "ready"}, 'requires order="file"'),
    ]:
        with pytest.raises(ValueError, match=message):
            vllm.loader(model_loader_extra_config=extra)


def test_options_of_vllm_are_passed_on(vllm):
    if not hasattr(vllm.model_loader.DefaultModelLoader(vllm.config()), "enable_weights_track"):
        pytest.skip("this vLLM has no such option")
    loader = vllm.loader(model_loader_extra_config={"enable_weights_track": False, "window_bytes": 5})
    assert loader.enable_weights_track is False


@STUB
def test_composed_tensors_use_vllm(vllm, tmp_path):
    tensors = save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="safetensors_load_strategy='prefetch' has no effect"):
        vllm.loader(safetensors_load_strategy="prefetch")
    loader = vllm.loader()
    # vLLM sets this strategy when it detects such a checkpoint.
    loader.load_config.safetensors_load_strategy = "torchao"
    assert weights(loader, vllm.source(tmp_path)).keys() == {f"torchao.{name}" for name in tensors}


def test_experts_of_other_ranks_are_not_read(vllm, tmp_path, monkeypatch):
    """Weights of other ranks' experts are neither returned nor read. Their scales are."""
    monkeypatch.setenv("FST_READER", "pread")
    tensors = {"model.norm.weight": torch.ones(8)}
    for expert in range(4):
        tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = torch.full(
            (2 * MIB,), expert, dtype=torch.uint8
        )
        tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight_scale"] = torch.full((4,), float(expert))
    save_file(tensors, tmp_path / "model.safetensors")
    loader = vllm.loader()
    loader.local_expert_ids = {1, 2}
    with fst.profile() as profile:
        own = weights(loader, vllm.source(tmp_path))
    others = {f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in (0, 3)}
    assert_all_same(own, {name: tensor for name, tensor in tensors.items() if name not in others})
    own_bytes = sum(tensor.nbytes for tensor in own.values())
    assert own_bytes <= profile.summary().read_bytes < own_bytes + MIB
    loader.local_expert_ids = None
    with fst.profile() as profile:
        assert_all_same(weights(loader, vllm.source(tmp_path)), tensors)
    assert profile.summary().read_bytes >= sum(tensor.nbytes for tensor in tensors.values())


def load_together(directory, world_size):
    """Loads weights as a rank of vLLM does, with all experts and with its own. Returns the number of streams."""
    everything = load_file(f"{directory}/model.safetensors")
    own = {name: tensor for name, tensor in everything.items() if f"experts.{1 - dist.get_rank()}." not in name}
    with imports_anew("vllm", stub=True), mock.patch("fst.stream_sharded", wraps=fst.stream_sharded) as streams:
        from vllm.config.load import LoadConfig
        from vllm.distributed import parallel_state
        from vllm.model_executor import model_loader

        import fst.plugins.vllm as plugin

        parallel_state.get_tp_group = lambda: group_of_ranks(world_size)
        loader = plugin.FstModelLoader(LoadConfig(load_format="fst", model_loader_extra_config=TOGETHER))
        for local_expert_ids, expected in ((None, everything), ({dist.get_rank()}, own)):
            loader.local_expert_ids = local_expert_ids
            assert_all_same(weights(loader, model_loader.DefaultModelLoader.Source(directory, None)), expected)
    return streams.call_count


@pytest.mark.parametrize(("world_size", "streams"), [(2, 2), (1, 0)])
def test_ranks_load_as_group(ranks, tmp_path, world_size, streams):
    tensors = {f"layers.0.experts.{expert}.up_proj.weight": torch.full((9,), float(expert)) for expert in range(2)}
    save_file({"norm.weight": torch.ones(8), **tensors}, tmp_path / "model.safetensors")
    assert ranks(2).run(load_together, str(tmp_path), world_size) == [streams] * 2


def test_abandoned_iterator_ends_stream(vllm, tmp_path, monkeypatch):
    save_checkpoint(tmp_path)
    stream = fst.stream(tmp_path)
    monkeypatch.setattr(fst, "stream", lambda *arguments, **options: stream)
    found = vllm.loader()._get_weights_iterator(vllm.source(tmp_path))
    next(found)
    del found
    assert list(stream) == []


def test_progress_bar(vllm, tmp_path, capsys):
    save_checkpoint(tmp_path)
    for shown in (True, False):
        weights(vllm.loader(use_tqdm_on_load=shown), vllm.source(tmp_path))
        assert ("Loading safetensors with fst" in capsys.readouterr().err) is shown


@pytest.mark.parametrize(
    ("platform", "is_cuda", "config", "device"),
    [
        ("cpu", False, None, "cpu"),
        ("cuda", True, None, "cuda"),
        ("cuda", True, "cuda:1", "cuda:1"),
        ("cuda", True, "cpu", "cpu"),
        # fst does not support ROCm.
        ("cuda", False, None, "cpu"),
        ("xpu", False, None, "cpu"),
    ],
)
def test_device(vllm, monkeypatch, platform, is_cuda, config, device):
    monkeypatch.setattr(vllm.plugin, "current_platform", SimpleNamespace(device_type=platform, is_cuda=lambda: is_cuda))
    assert vllm.loader(device=config)._device() == torch.device(device)


@pytest.mark.gpu
def test_gpu(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.plugin, "current_platform", SimpleNamespace(device_type="cuda", is_cuda=lambda: True))
    check_gpu(vllm, tmp_path)


@REAL
def test_files_outside_index_are_ignored(vllm, tmp_path):
    tensors = save_checkpoint(tmp_path)
    index = {name: path.name for path in sorted(tmp_path.glob("*.safetensors")) for name in load_file(path)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"everything": torch.zeros(3)}, tmp_path / "other.safetensors")
    assert_all_same(weights(vllm.loader(), vllm.source(tmp_path)), tensors)


@REAL
def test_other_file_formats_use_vllm(vllm, tmp_path):
    tensors = {"weight": torch.arange(6.0)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_all_same(weights(vllm.loader(), vllm.source(tmp_path)), tensors)


GENERATE = """
import sys
from vllm import LLM, SamplingParams


def generate(llm):
    sampling = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=1)
    [output] = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], sampling)
    print("generated", output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)


if __name__ == "__main__":
    model, other, load_format = sys.argv[1:]
    llm = LLM(
        model,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        model_loader_extra_config={"window_bytes": 100_000} if load_format == "fst" else {},
        weight_transfer_config={"backend": "fst"} if load_format == "fst" else None,
    )
    generate(llm)
    llm.collective_rpc("reload_weights")
    generate(llm)
    if load_format == "fst":
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": other}})
        llm.finish_weight_update()
    else:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    generate(llm)
"""


def test_engine_generates_same_tokens(tmp_path, python_environ):
    """The engine generates the same tokens with its own reader and with fst, also after reloading and an update."""
    pytest.importorskip("vllm.model_executor.model_loader", exc_type=ImportError)
    models = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)
    environ = python_environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    usual, _ = run_engine("vllm.general_plugins", GENERATE, *models, "safetensors", environ=environ)
    ours, log = run_engine("vllm.general_plugins", GENERATE, *models, "fst", environ=environ)
    assert (len(usual), len(set(usual))) == (3, 2)
    assert ours == usual
    assert "Loading safetensors with fst" in log
