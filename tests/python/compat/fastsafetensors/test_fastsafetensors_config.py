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
    assert config.create_parallel_kwargs()["queue_size"] == 2
    assert compat.LoaderConfig(max_batch_bytes=5).create_parallel_kwargs() == {
        "queue_size": -1,
        "max_batch_bytes": 5,
        "use_chunk_budget_as_allocation_size": False,
        "device_memory_budget": None,
    }
    base = config.get_extension_config("base")
    assert base == {"copier_type": "nogds", "bbuf_size_kb": 1024, "max_threads": 4}
    base.clear()
    assert config.get_extension_config("base") != {}
    assert config.get_extension_config("none") == {}


@pytest.mark.parametrize(("content", "error"), [("{", "are not JSON: "), ("[]", "must be a JSON object, not list")])
def test_invalid_settings_files(content, error):
    Path("settings.json").write_text(content)
    with pytest.raises(ValueError, match=f"settings.json: the settings {error}"):
        compat.LoaderConfig.from_file("settings.json")


def test_places_of_settings(monkeypatch):
    assert compat.load_config() == compat.LoaderConfig.from_dict({}) == compat.LoaderConfig()
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
        ({"parallel": {"max_concurrent_producers": 0}}, ValueError, "max_concurrent_producers must be 1"),
    ],
)
def test_settings_without_support(settings, error, message):
    Path(DEFAULT_CONFIG_PATH).write_text(json.dumps(settings))
    with pytest.raises(error, match=message):
        compat.AutoLoader(None, FILES)


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
        ({"FASTSAFETENSORS_EP_SLICE": "0"}, None),
        ({"FASTSAFETENSORS_EP_NUM_EXPERTS": "0"}, None),
        ({"FASTSAFETENSORS_EP_SIZE": "1"}, None),
        ({"FASTSAFETENSORS_EP_SIZE": "0"}, None),
        ({"FASTSAFETENSORS_EP_NUM_EXPERTS": "many"}, '_EP_NUM_EXPERTS must be a whole number, not "many"'),
        ({"FASTSAFETENSORS_EP_RANK": "2"}, "ep_rank must be"),
    ],
)
def test_experts_from_environment(monkeypatch, variables, owned):
    for name, value in (EXPERTS | variables).items():
        monkeypatch.setenv(name, value)
    if isinstance(owned, str):
        with pytest.raises(ValueError, match=owned):
            compat.expert_parallel_filter_from_env()
    elif owned is None:
        assert compat.expert_parallel_filter_from_env() is None
    else:
        assert owned_experts() == owned


def owned_experts_of_rank():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTSAFETENSORS_EP_SLICE", "1")
        patch.setenv("FASTSAFETENSORS_EP_NUM_EXPERTS", "4")
        patch.setenv("RANK", str(1 - dist.get_rank()))
        return owned_experts()


def test_experts_of_process_group(ranks):
    assert ranks(2).run(owned_experts_of_rank) == [[0, 1], [2, 3]]
