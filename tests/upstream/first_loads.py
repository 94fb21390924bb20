"""Compares the weights that servers' own loaders and fst load, on two ranks of tensor parallelism on the CPU.

    make first-loads                                # vllm and sglang; or:
    python tests/upstream/first_loads.py vllm       # in the environment of `make build`, see README.md beside it

Servers are installed as by servers.py. Small random models of several classes are saved, and each rank builds and
loads them with the server's own classes: with the load format `auto`, and with `fst`. The digests of all parameters and
buffers must be equal. The output has the bytes of parameters on a rank, and the bytes that it has read with fst.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments

import servers

CHECKOUT = Path(__file__).resolve().parents[2]
RANKS = 2
# Loads a model from a path with a load format, and calls a function with it, and another one before.
Load = Callable[..., None]
# Minutes for all models of a server.
TIMEOUT_MIN = 30

# Classes of transformers with their arguments beyond those that all have.
_SIZES = {"vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 128}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
_MOE = {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**_HEADS, "intermediate_size": 2816},
    "Qwen2": {**_HEADS, "intermediate_size": 2816, "tie_word_embeddings": True},
    "Phi3": {**_HEADS, "intermediate_size": 2816, "pad_token_id": 0, "eos_token_id": 0},
    "Gemma3": {**_HEADS, "intermediate_size": 2816, "head_dim": 128},
    "Mixtral": {**_HEADS, **_MOE, "intermediate_size": 2048, "num_local_experts": 4},
    "Qwen3Moe": {
        **_HEADS,
        **_MOE,
        "intermediate_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 8,
        "head_dim": 128,
    },
    "GptOss": {
        **_HEADS,
        **_MOE,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Its loader computes with parameters.
    "Mamba2": {"num_heads": 16, "head_dim": 128, "state_size": 64, "n_groups": 2},
}
# Models that are saved, or loaded, in another way: FP8 with a scale for each tensor or for each block, ranks that have
# whole experts, and ranks that have whole layers.
VARIANTS = ("Llama-fp8", "Llama-fp8_blocks", "Qwen3Moe-fp8_blocks", "Qwen3Moe-experts", "Llama-stages")
# Models that only one server builds on a CPU without AMX.
ONLY = {
    **dict.fromkeys(("GptOss", "Mamba2", "Llama-fp8", "Qwen3Moe-experts", "Llama-stages"), "vllm"),
    **dict.fromkeys(("Llama-fp8_blocks", "Qwen3Moe-fp8_blocks"), "sglang"),
}
_BLOCK = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[[], *servers.SERVERS], help="the servers; all if none is named")
    names = [*MODELS, *VARIANTS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="the models; by default all")
    parser.add_argument("--formats", nargs="*", default=[], metavar="FORMAT", help="other load formats to measure")
    parser.add_argument("--install", nargs="*", default=[], metavar="RELEASE", help="packages that these need")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "PORT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.servers or list(servers.SERVERS)
    if options.rank:
        rank, port, folder = options.rank
        load = LOADERS[names[0]](int(rank), int(port), RANKS)
        _run_rank(load, int(rank), [Path(folder) / model for model in options.models], options.formats)
        return
    failed = [name for name in names if not _run(name, options)]
    if failed:
        sys.exit(f"loads differ or fail: {', '.join(failed)}")


def _run(name: str, options: argparse.Namespace) -> bool:
    """Runs the ranks of a server. Returns whether all models are equal on both."""
    models = [model for model in options.models if ONLY.get(model, name) == name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = servers.install(servers.SERVERS[name], folder / "venv")
        for release in options.install:
            environments.install_release(python, release)
        for model in models:
            program = f"import first_loads; first_loads.save_model({model!r}, {str(folder / model)!r})"
            subprocess.run([python, "-c", program], cwd=Path(__file__).parent, env=environ(), check=True)
        port = free_port()
        command = [python, __file__, name, "--models", *models, "--formats", *options.formats, "--rank"]
        ranks = []
        for rank in range(RANKS):
            log = (folder / f"rank{rank}.log").open("w")
            arguments = [*command, str(rank), str(port), str(folder)]
            ranks.append(subprocess.Popen(arguments, env=environ(), stdout=log, stderr=subprocess.STDOUT))
        try:
            for process in ranks:
                process.wait(TIMEOUT_MIN * 60)
        finally:
            for process in ranks:
                process.kill()
        logs = [(folder / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    print(servers.SERVERS[name].release)
    results = [line for log in logs for line in log.splitlines() if line.startswith("{")]
    messages = [line for line in logs[0].splitlines() if "fst loaded" in line or "fst passes" in line]
    print(*results, *messages, sep="\n", flush=True)
    is_equal = len(results) == RANKS * len(models) and all(json.loads(line)["differ"] == [] for line in results)
    if not is_equal:
        print(logs[0][-10_000:])
    return is_equal


def free_port() -> int:
    """Returns a port that no program of this machine listens on."""
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def environ() -> dict[str, str]:
    """Returns the environment of a process with a server on the CPU."""
    own = {
        "PYTHONPATH": str(CHECKOUT / "torch_ext"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # Counted by the kernel, as reads for a GPU are.
        "FST_READER": "pread",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "SGLANG_NCCL_SO_PATH": "none",
    }
    return os.environ | own


def save_model(title: str, path: str) -> None:
    """Saves a random model of a class of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, _, variant = title.partition("-")
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**_SIZES, **MODELS[name])
    getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(path, max_shard_size="30MB")
    if variant.startswith("fp8"):
        _quantize(Path(path), has_blocks=variant == "fp8_blocks")


def _quantize(folder: Path, *, has_blocks: bool) -> None:
    """Replaces the weights of linear layers by codes of FP8 with random scales."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors[name] = tensor
            if not re.search(r"(_proj|expert.*)\.weight$", name):
                continue
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            grid = [-(-size // _BLOCK) for size in tensor.shape] if has_blocks else []
            tensors[f"{name}_scale_inv" if has_blocks else f"{name}_scale"] = torch.rand(grid) + 0.5
        save_file(tensors, file, {"format": "pt"})
    # The names of the scales are not in the index. Both servers then read all files.
    for index in folder.glob("*.index.json"):
        index.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["quantization_config"] |= {"weight_block_size": [_BLOCK, _BLOCK]} if has_blocks else {}
    (folder / "config.json").write_text(json.dumps(config))


def _run_rank(load: Load, rank: int, models: list[Path], others: list[str]) -> None:
    """Loads models with `auto`, `fst` and other formats, and prints a line for each model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for path in models:
        result: dict[str, Any] = {"model": path.name, "rank": rank}
        try:
            own, expected = _loaded(load, path, "auto")
            read, found = _loaded(load, path, "fst")
            result["differ"] = [name for name, digest in expected.items() if found.get(name) != digest]
            result |= {"tensors": len(expected), "auto": own, "fst": read}
        except Exception as error:
            traceback.print_exc()
            result["differ"] = [repr(error)]
        for load_format in others:
            try:
                figures, found = _loaded(load, path, load_format)
                result[load_format] = figures | {"is_equal": found == expected}
            except Exception as error:
                traceback.print_exc()
                result[load_format] = repr(error)
        print(json.dumps(result), flush=True)


def _loaded(load: Load, path: Path, load_format: str) -> tuple[dict[str, float], dict[str, str]]:
    """Returns figures of a load, and a digest of each parameter and buffer.

    The figures are: bytes of parameters, bytes that system calls have read, CPU time in seconds, and by how much
    anonymous memory grew at most, in MiB, with the parameters.
    """
    results = []
    meter = _Meter()

    def inspect(model: Any) -> None:
        figures = meter.end()
        figures["parameter_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
        named = [*model.named_parameters(), *model.named_buffers()]
        results.append((figures, {name: digest(tensor) for name, tensor in named}))
        raise LoadedError

    with contextlib.suppress(LoadedError):
        load(str(path), load_format, inspect, meter.begin)
    [result] = results
    return result


class LoadedError(Exception):
    """Ends a load before the server processes the weights, for which its build for CPUs may lack kernels."""


class _Meter:
    """What this process reads and uses between two points."""

    def begin(self) -> None:
        self._is_running, self._peak, self._anonymous = True, 0, _anonymous_kib()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        self._read, self._cpu = _bytes_read(), time.process_time()

    def end(self) -> dict[str, float]:
        cpu, read = time.process_time() - self._cpu, _bytes_read() - self._read
        self._is_running = False
        self._thread.join()
        anonymous = (self._peak - self._anonymous) >> 10
        return {"read_bytes": read, "cpu_s": round(cpu, 2), "anonymous_mib": anonymous}

    def _sample(self) -> None:
        while self._is_running:
            self._peak = max(self._peak, _anonymous_kib())
            time.sleep(0.005)


def _anonymous_kib() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1])


def _bytes_read() -> int:
    """Returns the number of bytes that system calls of this process have read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def digest(tensor: Any) -> str:
    """Returns a digest of the values of a tensor."""
    import torch

    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _vllm(rank: int, port: int, ranks: int) -> Load:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    count = iter(range(1000))

    def load(path: str, load_format: str, inspect: Callable[[Any], None], begin: Callable[[], None] = int) -> None:
        stages = ranks if path.endswith("-stages") else 1
        has_experts = path.endswith("-experts")
        config = EngineArgs(
            path,
            load_format=load_format,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            tensor_parallel_size=ranks // stages,
            pipeline_parallel_size=stages,
            enable_expert_parallel=has_experts,
            enable_ep_weight_filter=has_experts,
            distributed_executor_backend="mp",
        ).create_engine_config()
        with set_current_vllm_config(config):
            number = next(count)
            # The groups of a model depend on its configuration, and have shared memory of this name.
            os.environ["VLLM_DIST_IDENT"] = f"{port}-{number}"
            if number:
                parallel_state.destroy_model_parallel()
            else:
                address = f"tcp://127.0.0.1:{port}"
                parallel_state.init_distributed_environment(ranks, rank, address, rank, "gloo")
            parallel_state.initialize_model_parallel(ranks // stages, stages)
            loader = get_model_loader(config.load_config)
            load_weights = loader.load_weights

            def load_and_inspect(model: Any, model_config: Any) -> None:
                begin()
                load_weights(model, model_config)
                inspect(model)

            loader.load_weights = load_and_inspect
            loader.load_model(config, config.model_config)

    return load


def _sglang(rank: int, port: int, ranks: int) -> Load:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    load_plugins()
    count = iter(range(1000))

    def load(path: str, load_format: str, inspect: Callable[[Any], None], begin: Callable[[], None] = int) -> None:
        arguments = ServerArgs(
            model_path=path,
            load_format=load_format,
            device="cpu",
            attention_backend="torch_native",
            tp_size=ranks,
            dtype="bfloat16",
            skip_tokenizer_init=True,
        )
        set_global_server_args_for_scheduler(arguments)
        config = ModelConfig.from_server_args(arguments)
        if not next(count):
            parallel_state.init_distributed_environment(
                backend="gloo",
                world_size=ranks,
                rank=rank,
                local_rank=rank,
                distributed_init_method=f"tcp://127.0.0.1:{port}",
            )
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        initialize_dp_attention(server_args=arguments, model_config=config)
        loader = get_model_loader(LoadConfig(load_format=load_format), config)
        begin()
        inspect(loader.load_model(model_config=config, device_config=DeviceConfig("cpu")))

    return load


LOADERS = {"vllm": _vllm, "sglang": _sglang}


if __name__ == "__main__":
    main()
