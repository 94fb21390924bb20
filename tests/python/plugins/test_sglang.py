"""SGLang with `--load-format fst`: against a stub of its interface, and against SGLang if it is installed."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

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

PACKAGE = "sglang.srt.model_loader.loader"

# Server arguments that the loader reads.
ARGUMENTS = {
    "model_checksum": None,
    "weight_loader_disable_mmap": False,
    "weight_loader_prefetch_checkpoints": False,
    "weight_loader_prefetch_num_threads": 4,
    "weight_loader_drop_cache_after_load": False,
}


@pytest.fixture(params=["stub", "real"])
def sglang(request, monkeypatch):
    """Names of SGLang and of the registered plugin that the tests use."""
    if request.param == "real":
        pytest.importorskip(PACKAGE, exc_type=ImportError)
    with imports_anew("sglang", stub=request.param == "stub"):
        from sglang.srt.configs.load_config import LoadConfig, LoadFormat
        from sglang.srt.model_loader import loader
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.server_args import LOAD_FORMAT_CHOICES

        import fst.plugins.sglang as plugin

        arguments = SimpleNamespace(**ARGUMENTS)
        # The name differs between versions of SGLang.
        for name in ("get_server_args", "get_model"):
            if hasattr(loader, name):
                monkeypatch.setattr(loader, name, lambda: arguments)
        plugin.register()
        HookRegistry.apply_hooks()
        yield SimpleNamespace(
            plugin=plugin,
            module=loader,
            formats=LoadFormat,
            choices=LOAD_FORMAT_CHOICES,
            arguments=arguments,
            config=LoadConfig,
            loader=lambda **options: loader.get_model_loader(LoadConfig(load_format="fst", **options)),
            source=lambda path, prefix="": loader.DefaultModelLoader.Source(str(path), None, prefix=prefix),
        )


def test_weights(sglang, tmp_path):
    check_weights(sglang, tmp_path)


def test_registration(sglang):
    check_entry_point("sglang.srt.plugins", sglang.plugin.register)
    before = sglang.choices.count("fst")
    sglang.plugin.register()
    assert sglang.choices.count("fst") == before >= 1


def test_load_format_selects_loader(sglang):
    loader = sglang.loader(model_loader_extra_config='{"window_bytes": 1000, "order": "ready", "device": "cpu"}')
    assert type(loader).__name__ == "FstModelLoader"
    assert (loader._options.window_bytes, loader._options.order, loader._options.device) == (1000, "ready", "cpu")
    # Updates of weights from disk require this class.
    assert isinstance(loader, sglang.module.DefaultModelLoader)
    assert type(sglang.module.get_model_loader(sglang.config(load_format="FST"))) is type(loader)


def test_other_load_formats(sglang):
    assert sglang.config().load_format is sglang.formats.AUTO
    assert type(sglang.module.get_model_loader(sglang.config())) is sglang.module.DefaultModelLoader
    with pytest.raises(ValueError, match="'fast' is not a valid LoadFormat"):
        sglang.config(load_format="fast")


def test_other_loaders_do_not_use_fst(sglang, tmp_path):
    """The readers of SGLang are restored after fst's loader has found its files."""
    tensors = save_checkpoint(tmp_path)
    sglang.loader()._get_weights_iterator(sglang.source(tmp_path))
    with fst.profile() as profile:
        usual = sglang.module.DefaultModelLoader(sglang.config())
        assert_all_same(weights(usual, sglang.source(tmp_path)), tensors)
    assert profile.summary().loads == 0


def load_together(directory):
    """Loads weights as a rank of SGLang does."""
    with imports_anew("sglang", stub=True):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_loader import loader as module

        from fst.plugins._sglang_loader import FstModelLoader

        parallel_state.get_tp_group = lambda: group_of_ranks(2)
        module.get_server_args = lambda: SimpleNamespace(**ARGUMENTS)
        loader = FstModelLoader(LoadConfig(load_format="auto", model_loader_extra_config=TOGETHER))
        with mock.patch("fst.stream_sharded", wraps=fst.stream_sharded) as streams:
            found = weights(loader, module.DefaultModelLoader.Source(directory, None))
        return streams.call_count, found


def test_ranks_load_as_group(ranks, tmp_path):
    tensors = save_checkpoint(tmp_path)
    for streams, found in ranks(2).run(load_together, str(tmp_path)):
        assert streams == 1
        assert_all_same(found, tensors)


def test_arguments_of_the_default_reader_are_refused(sglang, tmp_path, monkeypatch):
    save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="unknown option in the extra config: 'enable_multithread_load'"):
        sglang.loader(model_loader_extra_config={"enable_multithread_load": 1})
    for argument, reading in [
        ("weight_loader_disable_mmap", "disable_mmap"),
        ("weight_loader_prefetch_checkpoints", "prefetch"),
        ("weight_loader_drop_cache_after_load", "drop_cache_after_load"),
    ]:
        monkeypatch.setattr(sglang.arguments, argument, True)
        with pytest.raises(ValueError, match=f"does not support {reading};"):
            sglang.loader()._get_weights_iterator(sglang.source(tmp_path))
        monkeypatch.setattr(sglang.arguments, argument, False)


class QuantizedConfig:
    """Model configuration with the attributes that the choice of a loader reads."""

    quantization = "modelopt"
    modelopt_quant = None
    quantize_and_serve = False

    def __init__(self, already, path=None):
        self.already = already
        self.model_path = path

    def _is_already_quantized(self):
        return self.already


@pytest.mark.parametrize("sglang", ["stub"], indirect=True)
def test_quantizing_loader_is_not_bypassed(sglang, tmp_path, monkeypatch):
    from sglang.srt.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group_of_ranks(1))
    tensors = save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="with ModelOptModelLoader, which does more than load"):
        sglang.loader().load_model(model_config=QuantizedConfig(False, tmp_path), device_config=None)
    found = sglang.loader().load_model(model_config=QuantizedConfig(True, tmp_path), device_config=None)
    assert_all_same(found.weights, tensors)


@pytest.mark.gpu
def test_gpu(sglang, tmp_path):
    torch.cuda.init()
    check_gpu(sglang, tmp_path)


GENERATE = """
import sys
import sglang


def generate(engine):
    output = engine.generate(input_ids=[1, 2, 3, 4], sampling_params={"max_new_tokens": 12, "temperature": 0})
    print("generated", output["output_ids"])


if __name__ == "__main__":
    model, other, load_format = sys.argv[1:]
    engine = sglang.Engine(
        model_path=model,
        load_format=load_format,
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        mem_fraction_static=0.1,
        max_total_tokens=512,
        disable_overlap_schedule=True,
        model_loader_extra_config='{"window_bytes": 100000}' if load_format == "fst" else "{}",
        log_level="info",
    )
    generate(engine)
    print(engine.update_weights_from_disk(other))
    generate(engine)
    engine.shutdown()
"""


def test_engine_generates_same_tokens(tmp_path, python_environ):
    """The engine generates the same tokens with its own reader and with fst, also after updating the weights."""
    pytest.importorskip(PACKAGE, exc_type=ImportError)
    models = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)
    usual, _ = run_engine("sglang.srt.plugins", GENERATE, *models, "auto", environ=python_environ)
    ours, log = run_engine("sglang.srt.plugins", GENERATE, *models, "fst", environ=python_environ)
    assert len(set(usual)) == 2
    assert ours == usual
    # The kernels for processors with AMX pack the weights, so that SGLang loads the update.
    assert log.count("Loading safetensors with fst: 100%") + log.count("fst updated the weights in place") == 2
