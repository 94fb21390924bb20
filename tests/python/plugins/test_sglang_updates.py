"""SGLang's updates from disk with fst: against a stub of its interface, and against SGLang if it is installed."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

import fst
from live import Fp8LinearMethod, assert_equal_models, loaded, save_weights
from serving import imports_anew


@pytest.fixture(params=["stub", "real"])
def sglang(request, monkeypatch):
    """Makes an updater of SGLang for a model that fst has loaded. The original updates are recorded."""
    if request.param == "real":
        pytest.importorskip("sglang.srt.model_loader.loader", exc_type=ImportError)
    with imports_anew("sglang", stub=request.param == "stub"):
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.plugins.hook_registry import HookRegistry

        import fst.plugins.sglang as plugin
        from fst.plugins import _sglang_update

        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1))
        original = []

        def usual(updater, model_path, load_format, **options):
            original.append((model_path, load_format))
            return True, "usual"

        with monkeypatch.context() as patch:
            # The registry of the real package keeps the hooks of earlier tests.
            patch.setattr(HookRegistry, "_hooks", defaultdict(list), raising=False)
            patch.setattr(HookRegistry, "_patched", set(), raising=False)
            patch.setattr(WeightUpdater, "update_weights_from_disk", usual)
            plugin.register()
            HookRegistry.apply_hooks()

            def updater(model, checkpoint):
                _sglang_update.keep_live(model, str(checkpoint))
                made = SimpleNamespace(
                    get_model=lambda: model, model_config=SimpleNamespace(model_path=str(checkpoint)), fields={}
                )
                made.update_model_fields = lambda model, **fields: made.fields.update(fields)
                made.update = lambda path, load_format="fst", **options: WeightUpdater.update_weights_from_disk(
                    made, str(path), load_format, recapture_cuda_graph=False, **options
                )
                made.original = original
                return made

            yield updater


def test_update_in_place(sglang, tmp_path, monkeypatch):
    commit = fst.Update.commit
    old, new = save_weights(tmp_path / "0", 0), save_weights(tmp_path / "1", 1)
    model = loaded(old)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    updater = sglang(model, tmp_path / "0")
    assert updater.update(tmp_path / "1") == (True, "Succeeded to update model weights.")
    assert_equal_models(model, loaded(new))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert updater.model_config.model_path == updater.fields["model_path"] == str(tmp_path / "1")
    # After the commit, nothing is read: the store may fail then.
    with monkeypatch.context() as patch:
        patch.setattr(
            fst.Update, "commit", lambda update: (commit(update), (tmp_path / "1").rename(tmp_path / "moved"))[0]
        )
        assert updater.update(tmp_path / "1") == (True, "Succeeded to update model weights.")
    succeeded, message = updater.update(tmp_path / "missing")
    assert not succeeded
    assert "missing: cannot open" in message
    assert_equal_models(model, loaded(new))
    assert updater.original == []


def test_other_updates_are_those_of_sglang(sglang, tmp_path):
    old = save_weights(tmp_path / "0", 0)
    model = loaded(old)
    updater = sglang(model, tmp_path / "0")
    updater.update(tmp_path / "1", "auto")
    updater.update(tmp_path / "2", weight_name_filter=str.isalpha)
    model.out.quant_method = Fp8LinearMethod()
    assert updater.update(tmp_path / "0") == (True, "usual")
    assert updater.original == [
        (str(tmp_path / "1"), "auto"),
        (str(tmp_path / "2"), "fst"),
        (str(tmp_path / "0"), "fst"),
    ]
    fst.save_delta(old, save_weights(tmp_path / "1", 1), tmp_path / "delta", version="1", base_version="0")
    succeeded, message = updater.update(tmp_path / "delta")
    assert (succeeded, len(updater.original)) == (False, 3)
    assert 'from a delta, because layer "out": Fp8LinearMethod may have' in message
