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
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import servers

CHECKOUT = Path(__file__).resolve().parents[2]
RANKS = 2
# Loads a model from a path with a load format, and calls a function with it.
Load = Callable[[str, str, Callable[[Any], None]], None]
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
# Models that only one server builds on a CPU without AMX.
ONLY = {"GptOss": "vllm", "Mamba2": "vllm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[[], *servers.SERVERS], help="the servers; all if none is named")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="the models; by default all")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "PORT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.servers or list(servers.SERVERS)
    if options.rank:
        rank, port, folder = options.rank
        load = _LOADERS[names[0]](int(rank), int(port))
        _run_rank(load, int(rank), [Path(folder) / model for model in options.models])
        return
    failed = [
        name for name in names if not _run(name, [model for model in options.models if ONLY.get(model, name) == name])
    ]
    if failed:
        sys.exit(f"loads differ or fail: {', '.join(failed)}")


def _run(name: str, models: list[str]) -> bool:
    """Runs the ranks of a server. Returns whether all models are equal on both."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = servers.install(servers.SERVERS[name], folder / "venv")
        for model in models:
            program = f"import first_loads; first_loads.save_model({model!r}, {str(folder / model)!r})"
            subprocess.run([python, "-c", program], cwd=Path(__file__).parent, env=_environ(), check=True)
        with contextlib.closing(socket.socket()) as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        command = [python, __file__, name, "--models", *models, "--rank"]
        ranks = []
        for rank in range(RANKS):
            log = (folder / f"rank{rank}.log").open("w")
            arguments = [*command, str(rank), str(port), str(folder)]
            ranks.append(subprocess.Popen(arguments, env=_environ(), stdout=log, stderr=subprocess.STDOUT))
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


def _environ() -> dict[str, str]:
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


def save_model(name: str, path: str) -> None:
    """Saves a random model of a class of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**_SIZES, **MODELS[name])
    getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(path, max_shard_size="30MB")


def _run_rank(load: Load, rank: int, models: list[Path]) -> None:
    """Loads models with both formats, and prints a line for each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for path in models:
        try:
            own, _, expected = _loaded(load, path, "auto")
            _, read, found = _loaded(load, path, "fst")
            differ = [name for name, digest in expected.items() if found.get(name) != digest]
            result = {"tensors": len(expected), "differ": differ, "parameter_bytes": own, "read_bytes": read}
        except Exception as error:
            traceback.print_exc()
            result = {"differ": [repr(error)]}
        print(json.dumps({"model": path.name, "rank": rank} | result), flush=True)


def _loaded(load: Load, path: Path, load_format: str) -> tuple[int, int, dict[str, str]]:
    """Returns the bytes of a model's parameters, the bytes that were read, and a digest of each tensor."""
    before, results = _bytes_read(), []

    def inspect(model: Any) -> None:
        read = _bytes_read() - before
        named = [*model.named_parameters(), *model.named_buffers()]
        digests = {name: _digest(tensor) for name, tensor in named}
        results.append((sum(parameter.nbytes for parameter in model.parameters()), read, digests))

    load(str(path), load_format, inspect)
    [result] = results
    return result


def _bytes_read() -> int:
    """Returns the number of bytes that system calls of this process have read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _vllm(rank: int, port: int) -> Load:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    count = iter(range(1000))

    def load(path: str, load_format: str, inspect: Callable[[Any], None]) -> None:
        config = EngineArgs(
            path,
            load_format=load_format,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            tensor_parallel_size=RANKS,
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
                parallel_state.init_distributed_environment(RANKS, rank, address, rank, "gloo")
            parallel_state.initialize_model_parallel(RANKS, 1)
            loader = get_model_loader(config.load_config)
            load_weights = loader.load_weights

            def load_and_inspect(model: Any, model_config: Any) -> None:
                load_weights(model, model_config)
                # vLLM packs the weights next.
                inspect(model)

            loader.load_weights = load_and_inspect
            loader.load_model(config, config.model_config)

    return load


def _sglang(rank: int, port: int) -> Load:
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

    def load(path: str, load_format: str, inspect: Callable[[Any], None]) -> None:
        arguments = ServerArgs(
            model_path=path,
            load_format=load_format,
            device="cpu",
            attention_backend="torch_native",
            tp_size=RANKS,
            dtype="bfloat16",
            skip_tokenizer_init=True,
        )
        set_global_server_args_for_scheduler(arguments)
        config = ModelConfig.from_server_args(arguments)
        if not next(count):
            parallel_state.init_distributed_environment(
                backend="gloo",
                world_size=RANKS,
                rank=rank,
                local_rank=rank,
                distributed_init_method=f"tcp://127.0.0.1:{port}",
            )
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        initialize_dp_attention(server_args=arguments, model_config=config)
        loader = get_model_loader(LoadConfig(load_format=load_format), config)
        inspect(loader.load_model(model_config=config, device_config=DeviceConfig("cpu")))

    return load


_LOADERS = {"vllm": _vllm, "sglang": _sglang}


if __name__ == "__main__":
    main()
