"""vLLM with the weight transfer engine `fst`: against a stub of its interface, and against vLLM if it is installed."""

from types import SimpleNamespace

import pytest
import torch

import fst
from live import Fp8LinearMethod, LiveModel, assert_equal_models, loaded, save_weights
from serving import imports_anew

STUB = pytest.mark.parametrize("vllm", ["stub"], indirect=True)


@pytest.fixture(params=["stub", "real"])
def vllm(request, monkeypatch):
    """Makes engines of vLLM for a model that holds a checkpoint."""
    if request.param == "real":
        pytest.importorskip("vllm.distributed.weight_transfer", exc_type=ImportError)
    with imports_anew("vllm", stub=request.param == "stub"):
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed import parallel_state
        from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory

        import fst.plugins.vllm as plugin

        if not hasattr(WeightTransferEngine, "start_weight_update"):
            pytest.skip("engines of this vLLM have no lifecycle of their own")
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1))
        # Other tests have registered it with the real package.
        monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
        plugin.register()

        def engine(model, checkpoint):
            config = SimpleNamespace(model_config=SimpleNamespace(model=str(checkpoint)), parallel_config=None)
            transfer = WeightTransferConfig(backend="fst")
            return WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), model)

        yield engine


def test_update_is_written_when_it_finishes(vllm, tmp_path):
    old, _, newer = (save_weights(tmp_path / str(seed), seed) for seed in range(3))
    model = loaded(old)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine = vllm(model, tmp_path / "0")
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine before"):
        engine.start_weight_update()
    engine.init_transfer_engine(engine.parse_init_info({"version": "7"}))
    # The first update is dropped, since vLLM does not finish what has failed on another worker.
    for path, version in (("1", None), ("2", "9")):
        engine.start_weight_update()
        engine.update_weights({"path": str(tmp_path / path), "version": version})
        assert_equal_models(model, loaded(old))
    assert fst.version_of([model.qkv.weight.data]) == "7"
    with pytest.raises(RuntimeError, match="send one message"):
        engine.update_weights({"path": str(tmp_path / "1")})
    engine.finish_weight_update()
    assert_equal_models(model, loaded(newer))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert fst.version_of([model.qkv.weight.data]) == "9"
    engine.shutdown()


def test_failed_updates_change_nothing(vllm, tmp_path):
    old = save_weights(tmp_path / "0", 0)
    fst.save_file(old | {"norm": torch.zeros(5)}, tmp_path / "other.safetensors")
    engine = vllm(model := loaded(old), tmp_path / "0")
    engine.init_transfer_engine(engine.parse_init_info({"checkpoint": str(tmp_path / "0")}))
    for message, error in [
        ({"path": str(tmp_path / "missing")}, FileNotFoundError),
        ({"path": str(tmp_path / "other.safetensors")}, fst.ModuleMismatchError),
        ({"path": 5}, ValueError),
        ({"path": []}, ValueError),
        ({}, (TypeError, ValueError)),
    ]:
        engine.start_weight_update()
        with pytest.raises(error):
            engine.update_weights(message)
        engine.finish_weight_update()
        assert_equal_models(model, loaded(old))
    with pytest.raises(NotImplementedError, match="save a checkpoint or a delta"):
        type(engine).trainer_send_weights(iter([]), {})


@STUB
def test_processed_weights_are_loaded_by_vllm(vllm, tmp_path, monkeypatch):
    old, new = save_weights(tmp_path / "0", 0), save_weights(tmp_path / "1", 1)
    model = LiveModel()
    model.out.quant_method = Fp8LinearMethod()
    load_weights = model.load_weights
    monkeypatch.setattr(model, "load_weights", lambda weights: load_weights(weights) if model.reloading else 1 / 0)
    engine = vllm(model, tmp_path / "0")
    engine.init_transfer_engine(engine.parse_init_info({}))
    engine.start_weight_update()
    engine.update_weights({"path": str(tmp_path / "1")})
    engine.finish_weight_update()
    assert_equal_models(model, loaded(new))
    assert model.reloading is False
    fst.save_delta(old, new, tmp_path / "delta", version="1", base_version="0")
    engine.start_weight_update()
    with pytest.raises(ValueError, match='from a delta, because layer "out": Fp8LinearMethod may have processed'):
        engine.update_weights({"path": str(tmp_path / "delta")})
