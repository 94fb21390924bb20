"""First loads of the model of a server: what a rank reads, and the models that get whole tensors."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import fst
from fst._core.group import RankError
from fst._deferred.tensor import NotRecordedError
from fst.compat.tensorizer import TensorSerializer
from fst.plugins._first_load import load_recorded
from fst.plugins._options import Options
from fst.plugins._recording import Recording
from fst_bench.http_server import Server
from live import LiveModel, assert_equal_models, loaded, save_weights
from rank_processes import Ranks
from serving import group_of_ranks, imports_anew

MIB = 1 << 20


def load(model, path, *, size=1, options=None, obstacle=""):
    """Loads a model as the loaders of servers do. Returns the message about the way, and the number of streams."""
    options = options or Options()
    messages = []

    def run(recording):
        tensors = fst.stream(path) if recording is None else recording.tensors([str(path)], torch.device("cpu"), None)
        model.load_weights(tensors)

    with mock.patch("fst.stream", wraps=fst.stream) as streams:
        load_recorded(
            model,
            run,
            options,
            group=lambda: group_of_ranks(size),
            bar=False,
            log=messages.append,
            obstacle=obstacle,
        )
    return "".join(messages), streams.call_count


class Experts(nn.Module):
    """Layer with stacked experts, a scale for each, and a loader that its subclasses extend."""

    def __init__(self, rank=0, size=1):
        super().__init__()
        self.rank, self.size = rank, size
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.empty(3, 8 // size, 2048).bfloat16(), requires_grad=False)
        self.experts.scale = nn.Parameter(torch.full((3,), 1.0), requires_grad=False)
        self.decay = nn.Parameter(torch.empty(32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(64), requires_grad=False)
        self.seen = []

    def load_weights(self, weights):
        with ThreadPoolExecutor(1) as executor:
            for future in [executor.submit(self.load_weight, *item) for item in weights]:
                future.result()
        return {"experts.w", "experts.scale", "decay", "bias"}

    def load_weight(self, name, tensor):
        kind, _, expert = name.partition(".")
        if kind == "w":
            rows = 8 // self.size
            self.experts.w.data[int(expert)].copy_(tensor.narrow(0, self.rank * rows, rows))
        elif kind == "scale":
            # A loader compares the scales of fused weights.
            assert self.experts.scale[int(expert)] == 1
            self.experts.scale.data[int(expert)] = tensor.item()
            assert self.experts.scale.data.numpy()[int(expert)] == tensor
        elif kind == "bias":
            # Another rank adds it.
            tensor = tensor.zero_() if self.rank else tensor
            self.bias.data.copy_(tensor)
        elif kind == "decay":
            self.decay.data.copy_(tensor)
            self.decay.data.copy_(-torch.exp(self.decay.float()))


def save_experts(path, missing=None):
    tensors = {f"w.{expert}": torch.randn(8, 2048) for expert in range(3) if expert != missing}
    tensors |= {f"scale.{expert}": torch.tensor(expert + 0.5) for expert in range(3)}
    save_file(tensors | {"decay": torch.randn(32), "bias": torch.randn(64)}, path)
    return path


def test_model_reads_what_it_keeps(tmp_path, monkeypatch):
    """Also where the loader uses threads, casts, reads its parameters and computes with them."""
    monkeypatch.setenv("FST_READER", "pread")
    path = save_experts(tmp_path / "m.safetensors")
    expected = Experts()
    expected.load_weights(load_file(path).items())
    with fst.profile() as profile:
        message, streams = load(model := Experts(), path)
    assert streams == 0
    assert "fst loaded 98,560 of 197,004 bytes into Experts" in message
    assert profile.summary().read_bytes < 1.1 * 197_004
    assert_equal_models(model, expected)
    assert "load_weights" not in vars(model)


def test_sources_of_weights(tmp_path, monkeypatch):
    """URLs, encrypted files and files of tensorizer's format are read in parts, too."""
    path = save_experts(tmp_path / "m.safetensors")
    tensors = load_file(path)
    expected = Experts(rank=1, size=2)
    expected.load_weights({name: tensor.clone() for name, tensor in tensors.items()}.items())
    key = fst.EncryptionKey.random()
    fst.save_file(tensors, tmp_path / "encrypted.safetensors", encryption_key=key)
    (tmp_path / "key").write_bytes(key.to_bytes())
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "key"))
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_state_dict(tensors)
    with Server() as server:
        server.put("m.safetensors", path.read_bytes())
        for source in (server.url("m.safetensors"), tmp_path / "encrypted.safetensors", tmp_path / "m.tensors"):
            message, streams = load(model := Experts(rank=1, size=2), source)
            assert (streams, "fst loaded 49,152 of 197,004 bytes" in message) == (0, True)
            assert_equal_models(model, expected)


def test_models_that_are_not_recorded_get_whole_tensors(tmp_path):
    path = save_experts(tmp_path / "m.safetensors")
    expected = Experts()
    expected.load_weights(load_file(path).items())

    def extended(extend):
        class Extended(Experts):
            def load_weight(self, name, tensor):
                super().load_weight(name, tensor)
                if name == "w.1":
                    extend(self, tensor)

        return Extended()

    def swallow(model, tensor):
        try:
            tensor.sum()
        except Exception:
            model.seen.append("error")

    def copy_in_thread(model, tensor):
        def copy():
            with contextlib.suppress(NotRecordedError):
                model.experts.w.data[1].copy_(tensor)

        thread = threading.Thread(target=copy, name="own")
        thread.start()
        thread.join()

    def replace(model, tensor):
        model.experts.w = nn.Parameter(model.experts.w.data.clone(), requires_grad=False)

    for extend, reason in [
        (lambda model, tensor: tensor.max().item(), 'aten.max.default needs the values of "w.1"'),
        (swallow, 'aten.sum.default needs the values of "w.1"'),
        (lambda model, tensor: setattr(model, "kept", [tensor]), 'it keeps "w.1" itself'),
        (
            lambda model, tensor: setattr(model.experts.w, "data", model.experts.w.data.clone()),
            "replaces the parameter",
        ),
        (replace, "replaces the parameter"),
        (copy_in_thread, "it starts the thread own"),
        (lambda model, tensor: tensor.data_ptr(), "RuntimeError"),
    ]:
        model = extended(extend)
        address = model.experts.w.data_ptr()
        message, streams = load(model, path)
        assert streams == 1
        assert "fst passes whole tensors to Extended, because" in message
        assert reason in message
        assert "replaces" in reason or model.experts.w.data_ptr() == address
        assert_equal_models(model, expected)
    (online := Experts()).quant_method = SimpleNamespace(uses_meta_device=True)
    assert 'SimpleNamespace of "" works on weights' in load(online, path)[0]
    assert load(Experts(), path, obstacle="of its configuration")[1] == 1
    assert load(Experts(), path, options=Options(ranks="together")) == ("", 1)


def test_checkpoints_that_do_not_fit_are_refused_before_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    whole = load_file(save_experts(tmp_path / "m.safetensors"))
    save_experts(tmp_path / "missing.safetensors", missing=1)
    save_file(whole | {"w.1": torch.zeros(8, 2047)}, tmp_path / "wrong.safetensors")
    save_file(whole | {"w.1": torch.zeros(7, 2048)}, tmp_path / "short.safetensors")
    for name, error, text in [
        ("missing", ValueError, r'no tensor of the checkpoint fills "experts.w" of shape \[3, 8, 2048\] at index 1'),
        ("wrong", RuntimeError, r"The expanded size of the tensor \(2048\) must match the existing size \(2047\)"),
        ("short", (RuntimeError, IndexError), r"exceeds dimension size \(7\)"),
        ("absent", FileNotFoundError, "absent"),
    ]:
        model = Experts()
        with fst.profile() as profile, pytest.raises(error, match=text) as caught:
            load(model, tmp_path / f"{name}.safetensors")
        assert profile.summary().read_bytes < 4096
        if name in ("wrong", "short"):
            # Python 3.11 shows notes.
            assert str(tmp_path) in "".join(getattr(caught.value, "__notes__", [str(tmp_path)]))


def test_interrupt_ends_the_record(tmp_path):
    class Interrupted(Experts):
        def load_weight(self, name, tensor):
            super().load_weight(name, tensor)
            self.seen.append(name)
            signal.raise_signal(signal.SIGINT)

    model = Interrupted()
    for parameter in model.parameters():
        parameter.fill_(1)
    with pytest.raises(KeyboardInterrupt):
        load(model, save_experts(tmp_path / "m.safetensors"))
    assert len(model.seen) == 1
    assert all((parameter == 1).all() for parameter in model.parameters())
    assert "load_weights" not in vars(model)


def load_shards(directory):
    """Loads shards on the ranks of vLLM and SGLang. Returns messages, and bytes that a rank read and keeps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    with imports_anew("vllm", stub=True):
        from vllm.config import ModelConfig
        from vllm.config.load import LoadConfig
        from vllm.distributed import parallel_state

        import fst.plugins.vllm as plugin

        parallel_state.get_tp_group = lambda: group_of_ranks(size)
        for model in (LiveModel(rank, size), Experts(rank, size)):
            messages = []
            plugin.logger = SimpleNamespace(info=messages.append)
            folder = f"{directory}/{type(model).__name__}"
            loader = plugin.FstModelLoader(LoadConfig(load_format="fst", use_tqdm_on_load=False))
            with fst.profile() as profile:
                loader.load_weights(model, ModelConfig(folder))
            expected = type(model)(rank, size)
            expected.load_weights(load_file(f"{folder}/model.safetensors").items())
            assert_equal_models(model, expected)
            results.append((messages, profile.summary().read_bytes))
        # A model that one rank cannot record is loaded in the same way by all.
        model = LiveModel(rank, size)
        model.quant_method = SimpleNamespace(uses_meta_device=rank == 1)
        messages = []
        plugin.logger = SimpleNamespace(info=messages.append)
        loader.load_weights(model, ModelConfig(f"{directory}/LiveModel"))
        results.append((messages, 0))
        with pytest.raises((ValueError, RankError), match="not initialized from checkpoint") as failure:
            loader.load_weights(LiveModel(rank, size), ModelConfig(f"{directory}/{'empty' if rank else 'LiveModel'}"))
        assert (failure.type is RankError) == (rank == 0)
    return results


def test_ranks_read_their_own_bytes(ranks, tmp_path, monkeypatch):
    save_weights(tmp_path / "LiveModel", 0)
    (tmp_path / "Experts").mkdir()
    (tmp_path / "empty").mkdir()
    save_file({"inv_freq": torch.ones(3)}, tmp_path / "empty" / "model.safetensors")
    save_experts(tmp_path / "Experts" / "model.safetensors")
    for rank, (live, experts, refused) in enumerate(ranks(2).run(load_shards, str(tmp_path))):
        assert "into LiveModel" in live[0][0]
        assert f"fst loaded {(49_408, 49_152)[rank]:,} of 197,004 bytes into Experts" in experts[0][0]
        assert experts[1] <= 1.1 * (197_004 / 2)
        assert "because on rank 1 SimpleNamespace" in refused[0][0]
        assert len(refused[0]) == 1, rank


class Columns(nn.Module):
    """Layer that keeps half of each row."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(256, 2048), requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.w.data.copy_(tensor.narrow(1, 2048 * dist.get_rank(), 2048))


def load_columns(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    with fst.profile() as profile:
        load(model := Columns(), path, size=2)
    assert torch.equal(model.w, load_file(path)["w"].chunk(2, dim=1)[dist.get_rank()])
    return profile.summary().read_bytes


def test_cold_rows_of_other_ranks_are_not_read(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    save_file({"w": torch.randn(256, 4096)}, tmp_path / "m.safetensors")
    assert max(ranks(2).run(load_columns, str(tmp_path / "m.safetensors"))) < 1.1 * (2 * MIB)


class Disturbed(Experts):
    """Layer whose loader calls a function on rank 1, after the first expert is loaded."""

    def __init__(self, disturb):
        super().__init__(rank=dist.get_rank(), size=2)
        self.disturb = disturb

    def load_weight(self, name, tensor):
        super().load_weight(name, tensor)
        if name == "w.0" and self.rank:
            self.disturb()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(model, path):
    with fst.profile() as profile, pytest.raises(BaseException) as caught:  # noqa: PT011
        load(model, path, size=2)
    return f"{caught.type.__name__}: {caught.value}", profile.summary().read_bytes


def load_bad_weights(directory):
    """Returns what ranks raise for checkpoints that do not fit, and after Ctrl-C on rank 1, with the bytes read."""
    rank = dist.get_rank()
    found = [error_of(Experts(rank, 2), f"{directory}/{name}.safetensors") for name in ("missing", "wrong")]
    # One rank lacks the files.
    found.append(error_of(Experts(rank, 2), f"{directory}/{'absent' if rank else 'm'}.safetensors"))
    path = f"{directory}/m.safetensors"
    found.append(error_of(Disturbed(lambda: signal.raise_signal(signal.SIGINT)), path))
    model = Experts(rank, 2)
    interrupt = mock.patch.object(Recording, "own_bytes", side_effect=lambda: signal.raise_signal(signal.SIGINT) or 1)
    with interrupt if rank else contextlib.nullcontext():
        found.append(error_of(model, path))
    # The group can load again.
    load(model := Experts(rank, 2), path, size=2)
    expected = Experts(rank, 2)
    expected.load_weights(load_file(path).items())
    assert_equal_models(model, expected)
    return found


def test_errors_end_the_load_on_all_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("FST_READER", "pread")
    whole = load_file(save_experts(tmp_path / "m.safetensors"))
    save_experts(tmp_path / "missing.safetensors", missing=1)
    save_file(whole | {"w.1": torch.zeros(8, 2047)}, tmp_path / "wrong.safetensors")
    for rank, found in enumerate(ranks(2).run(load_bad_weights, str(tmp_path))):
        for index, text in enumerate(["so an expert has no weights", "must match the existing size", "absent"]):
            error, read = found[index]
            assert text in error, rank
            assert read < 4096
        for error, _ in found[3:]:
            assert error.startswith("KeyboardInterrupt" if rank else "RankError: rank 1 failed: KeyboardInterrupt")


def load_and_die(directory, is_filling):
    model = Experts(dist.get_rank(), 2) if is_filling else Disturbed(kill)
    dying = mock.patch.object(Recording, "fill", side_effect=lambda *arguments: kill())
    with dying if is_filling and dist.get_rank() else contextlib.nullcontext(), pytest.raises(RankError):
        load(model, f"{directory}/m.safetensors", size=2)


@pytest.mark.parametrize("is_filling", [False, True])
def test_dead_rank_ends_the_load(tmp_path, is_filling):
    save_experts(tmp_path / "m.safetensors")
    # It fails for a rank that takes longer than a minute.
    with pytest.raises(AssertionError, match=r"^rank 1: ended with exit code -9$"):
        Ranks(2).run(load_and_die, str(tmp_path), is_filling)


def test_sglang_processes_weights_after_the_load(tmp_path, monkeypatch, caplog):
    tensors = save_weights(tmp_path / "m", 0)
    caplog.set_level("INFO")
    with imports_anew("sglang", stub=True):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.model_loader import loader as module

        from fst.plugins._sglang_loader import FstModelLoader

        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1))
        arguments = dict.fromkeys(
            ["weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints", "weight_loader_drop_cache_after_load"]
        )
        monkeypatch.setattr(module, "get_server_args", lambda: SimpleNamespace(**arguments))
        config = SimpleNamespace(model_path=tmp_path / "m", quantization=None, build=LiveModel)
        # Older releases load and process the weights in one method.
        for is_old in (False, True):
            if is_old:
                default = module.DefaultModelLoader
                process = default.postprocess_weights
                monkeypatch.delattr(default, "load_weights_only")

                def both(model, weights, device, process=process):
                    model.load_weights(weights)
                    process(model, device)

                monkeypatch.setattr(default, "load_weights_and_postprocess", staticmethod(both))
            model = FstModelLoader(LoadConfig()).load_model(model_config=config, device_config=None)
            assert_equal_models(model, loaded(tensors))
            for name, tensor in model.processed.items():
                assert torch.equal(tensor, dict(model.named_parameters())[name])
    assert caplog.text.count("into LiveModel") == 2
