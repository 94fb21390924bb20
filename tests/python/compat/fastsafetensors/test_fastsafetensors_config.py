"""Settings from files and environment variables."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.config import CONFIG_ENV_VAR, DEFAULT_CONFIG_PATH

pytestmark = pytest.mark.usefixtures("directory")

FILES = ["a.safetensors", "b.safetensors"]
SETTINGS = {
    "loader": "base",
    "unknown": 1,
    "base": {"copier_type": "nogds", "bbuf_size_kb": 1024, "max_threads": 4, "framework": "paddle"},
    "3fs": {"mount_point": "/mnt/3fs"},
    "parallel": {"use_pipeline": True, "queue_size": 2, "use_tqdm_on_load": False, "max_batch_bytes": 300, "other": 1},
    "debug": {"set_numa": False},
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in (CONFIG_ENV_VAR, *EXPERTS, "FASTSAFETENSORS_EP_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_settings_file():
    Path("settings.json").write_text(json.dumps(SETTINGS))
    config = compat.LoaderConfig.from_file("settings.json")
    assert (config.loader, config.framework, config.set_numa) == ("base", "pytorch", False)
    assert (config.use_pipeline, config.queue_size, config.max_batch_bytes) == (True, 2, 300)
    assert not hasattr(config, "unknown")
    base = config.get_extension_config("base")
    assert base == {"copier_type": "nogds", "bbuf_size_kb": 1024, "max_threads": 4}
    base.clear()
    assert config.get_extension_config("base") != {}
    assert config.get_extension_config("none") == {}


def test_default_settings():
    assert compat.LoaderConfig.from_dict({}) == compat.LoaderConfig() == compat.load_config()


@pytest.mark.parametrize("settings", [{"max_concurrent_producers": 2}, {"parallel": {"max_concurrent_producers": 0}}])
def test_one_producer(settings):
    with pytest.raises(ValueError, match="max_concurrent_producers must be 1"):
        compat.LoaderConfig.from_dict(settings)


@pytest.mark.parametrize(("content", "error"), [("{", "are not JSON: "), ("[]", "must be a JSON object, not list")])
def test_invalid_settings_files(content, error):
    Path("settings.json").write_text(content)
    with pytest.raises(ValueError, match=f"settings.json: the settings {error}"):
        compat.LoaderConfig.from_file("settings.json")


def test_parallel_arguments():
    memory = {"max_batch_bytes": 5, "use_chunk_budget_as_allocation_size": True, "device_memory_budget": 9}
    assert compat.LoaderConfig(**memory).create_parallel_kwargs() == {"queue_size": -1, **memory}
    assert compat.LoaderConfig(**memory, use_pipeline=True, queue_size=3).create_parallel_kwargs() == {
        "max_concurrent_producers": 1,
        "queue_size": 3,
        "use_tqdm_on_load": True,
        **memory,
    }


def test_places_of_settings(monkeypatch):
    Path(DEFAULT_CONFIG_PATH).write_text('{"debug_log": true}')
    assert compat.load_config() == compat.LoaderConfig(debug_log=True)
    Path("other.json").write_text('{"set_numa": false}')
    monkeypatch.setenv(CONFIG_ENV_VAR, "other.json")
    assert compat.load_config() == compat.LoaderConfig(set_numa=False)
    monkeypatch.setenv(CONFIG_ENV_VAR, "none.json")
    with pytest.raises(FileNotFoundError, match=r"FASTSAFETENSORS_CONFIG names no file: 'none\.json'"):
        compat.load_config()


def test_auto_loader_settings(capsys):
    Path(DEFAULT_CONFIG_PATH).write_text(json.dumps(SETTINGS))
    loader = compat.AutoLoader(None, FILES)
    assert loader.config == compat.LoaderConfig.from_dict(SETTINGS)
    assert sorted(name for name, _ in loader.iterate_weights()) == ["a0", "b0", "b1"]
    assert capsys.readouterr().err == ""
    Path(DEFAULT_CONFIG_PATH).write_text('{"device_memory_budget": 100}')
    with pytest.raises(compat.BudgetInfeasibleError, match="device_memory_budget is 100 bytes"):
        compat.AutoLoader(None, FILES)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"loader": "other"}, ValueError, 'Unknown loader type: "other"'),
        ({"loader": "3fs"}, NotImplementedError, '"3fs" is not supported'),
        ({"framework": "paddle"}, NotImplementedError, "paddle"),
        ({"base": {"bbuf_size": 1}}, TypeError, "bbuf_size"),
    ],
)
def test_settings_without_support(settings, error, message):
    Path(DEFAULT_CONFIG_PATH).write_text(json.dumps(settings))
    with pytest.raises(error, match=message):
        compat.AutoLoader(None, FILES)


@pytest.mark.parametrize(
    ("copier_type", "nogds", "use_fgds"),
    [({}, False, False), ("gds", False, False), ("fgds", False, True), ("nogds", True, False)],
)
def test_copier_types(copier_type, nogds, use_fgds):
    settings = {"max_threads": 2} | ({"copier_type": copier_type} if copier_type else {})
    arguments = compat.SafeTensorsFileLoader.process_extension_config(settings, hf_weights_files=FILES)
    assert arguments == {"max_threads": 2, "nogds": nogds, "use_fgds": use_fgds}


EXPERTS = {
    "FASTSAFETENSORS_EP_SLICE": "1",
    "FASTSAFETENSORS_EP_NUM_EXPERTS": "4",
    "FASTSAFETENSORS_EP_SIZE": "2",
}


def owned_experts():
    keep = compat.expert_parallel_filter_from_env()
    assert keep("router")
    return [expert for expert in range(4) if keep(f"layers.0.experts.{expert}.weight")]


@pytest.mark.parametrize(
    ("variables", "owned"),
    [
        ({"FASTSAFETENSORS_EP_RANK": "1"}, [2, 3]),
        ({"RANK": "1", "WORLD_SIZE": "4"}, [2, 3]),
        ({"FASTSAFETENSORS_EP_SIZE": "0", "RANK": "1", "WORLD_SIZE": "4"}, [1]),
        ({}, [0, 1]),
    ],
)
def test_experts_from_environment(monkeypatch, variables, owned):
    for name, value in (EXPERTS | variables).items():
        monkeypatch.setenv(name, value)
    assert owned_experts() == owned


@pytest.mark.parametrize(
    "variables",
    [
        {"FASTSAFETENSORS_EP_SLICE": "0"},
        {"FASTSAFETENSORS_EP_NUM_EXPERTS": "0"},
        {"FASTSAFETENSORS_EP_SIZE": "1"},
        {"FASTSAFETENSORS_EP_SIZE": "0"},
    ],
)
def test_no_filter_from_environment(monkeypatch, variables):
    for name, value in (EXPERTS | variables).items():
        monkeypatch.setenv(name, value)
    assert compat.expert_parallel_filter_from_env() is None


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FASTSAFETENSORS_EP_NUM_EXPERTS", "many", 'FASTSAFETENSORS_EP_NUM_EXPERTS must be a whole number, not "many"'),
        ("FASTSAFETENSORS_EP_RANK", "2", "ep_rank must be"),
    ],
)
def test_invalid_experts_in_environment(monkeypatch, variable, value, message):
    for name, text in (EXPERTS | {variable: value}).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        compat.expert_parallel_filter_from_env()


def owned_experts_of_rank():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSAFETENSORS_EP_SLICE", "1")
        patch.setenv("FASTSAFETENSORS_EP_NUM_EXPERTS", "4")
        patch.setenv("RANK", str(1 - dist.get_rank()))
        return owned_experts()


def test_experts_of_process_group(ranks):
    assert ranks(2).run(owned_experts_of_rank) == [[0, 1], [2, 3]]
