"""Settings from files and environment variables, and filters for expert parallelism."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fst.compat import fastsafetensors as compat
from fst.compat.fastsafetensors.config import CONFIG_ENV_VAR, DEFAULT_CONFIG_PATH

pytestmark = pytest.mark.usefixtures("files")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in (CONFIG_ENV_VAR, *EXPERTS, "FASTSAFETENSORS_EP_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


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


def test_auto_loader_settings(files, capsys):
    settings = {"base": {"copier_type": "nogds"}, "parallel": {"use_pipeline": True, "use_tqdm_on_load": False}}
    Path(DEFAULT_CONFIG_PATH).write_text(json.dumps(settings))
    loader = compat.AutoLoader(None, files)
    assert loader.config == compat.LoaderConfig.from_dict(settings)
    assert sorted(name for name, _ in loader.iterate_weights()) == ["a0", "b0", "b1"]
    assert capsys.readouterr().err == ""
    Path(DEFAULT_CONFIG_PATH).write_text('{"device_memory_budget": 100}')
    with pytest.raises(compat.BudgetInfeasibleError, match="device_memory_budget is 100 bytes"):
        compat.AutoLoader(None, files)


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
def test_settings_without_support(files, settings, error, message):
    Path(DEFAULT_CONFIG_PATH).write_text(json.dumps(settings))
    with pytest.raises(error, match=message):
        compat.AutoLoader(None, files)


@given(st.integers(0, 300), st.integers(1, 40))
def test_owned_expert_ranges(experts, ranks):
    owned = [range(*compat.owned_expert_range(experts, ranks, rank)) for rank in range(ranks)]
    assert [expert for run in owned for expert in run] == list(range(experts))
    counts = [len(run) for run in owned]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_invalid_expert_ranks(size, rank):
    with pytest.raises(ValueError, match=r"ep_(size|rank) must be"):
        compat.owned_expert_range(4, size, rank)


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
