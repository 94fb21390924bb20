"""Compares the weights that servers' own loaders and fst load, on two ranks of tensor parallelism on the CPU.

    make first-loads                                # vllm and sglang; or:
    python tests/upstream/first_loads.py vllm       # in the environment of `make build`, see README.md beside it

Servers are installed as by servers.py. Small random models of several classes are saved, and each rank builds and
loads them with the server's own classes: with the load format `auto`, and with `fst`. The digests of all parameters and
buffers must be equal. Files are cold, and each rank may read 1.02 times the pages that have a byte of what it keeps.
With --rounds, the time and the memory of load formats are measured instead, each load in a process of its own.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import environments
from load_figures import PAGE, LoadedError, bytes_read, digest, drop_pages, needed_pages
from load_models import MODELS, ONLY, STREAMED, TORCHAO, VARIANTS
from load_times import print_times, time_formats

import servers

CHECKOUT = Path(__file__).resolve().parents[2]
RANKS = 2
# Loads a model from a path with a load format, and calls a function with it, and another one before.
Load = Callable[..., None]
# Minutes for all models of a server.
TIMEOUT_MIN = 30
# Readers with which ranks read cold files. The counter of `bytes_read` of each has the same place.
READERS = ("pread", "auto")
# Bytes that a rank reads at most, over the pages that have its bytes, and, of long rows, over its bytes.
SURPLUS_MAX = 1.02
WIDE_MAX = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", choices=[[], *servers.SERVERS], help="the servers; all if none is named")
    names = [*MODELS, *VARIANTS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="the models; by default all")
    parser.add_argument(
        "--formats", nargs="+", default=["auto", "fst"], metavar="FORMAT", help="what --rounds measures"
    )
    parser.add_argument("--rounds", type=int, default=0, help="measure time and memory of formats this many times")
    parser.add_argument("--install", nargs="*", default=[], metavar="RELEASE", help="packages that formats need")
    parser.add_argument("--environment", type=Path, help="folder of the server's environment, which is kept")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.servers or list(servers.SERVERS)
    if options.rank is not None:
        make_load = LOADERS[names[0]]
        if options.rounds:
            time_formats(make_load, options.rank, RANKS, options)
        else:
            load = make_load(options.rank, options.ports[0], RANKS)
            _run_rank(load, options.rank, [options.folder / model for model in options.models])
        return
    failed = [name for name in names if not _run(name, options)]
    if failed:
        sys.exit(f"loads differ or fail: {', '.join(failed)}")


def _run(name: str, options: argparse.Namespace) -> bool:
    """Runs the ranks of a server. Returns whether all models are equal on both."""
    models = [model for model in options.models if ONLY.get(model, name) == name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.monotonic()
        python = servers.install(servers.SERVERS[name], options.environment or folder / "venv")
        is_torchao = any("torchao" in model for model in models)
        for release in [*options.install, *([TORCHAO] if is_torchao else [])]:
            environments.install_release(python, release)
        print(f"{servers.SERVERS[name].release}: installed in {time.monotonic() - started:.0f} s", flush=True)
        for model in models:
            program = f"import load_models; load_models.save_model({model!r}, {str(folder / model)!r})"
            subprocess.run([python, "-c", program], cwd=Path(__file__).parent, env=environ(), check=True)
        ports = free_ports(max(1, options.rounds * len(models) * len(options.formats)))
        command = [python, __file__, name, "--models", *models, "--formats", *options.formats]
        command += ["--rounds", str(options.rounds), "--folder", str(folder), "--ports", *map(str, ports), "--rank"]
        ranks = []
        for rank in range(RANKS):
            log = (folder / f"rank{rank}.log").open("w")
            ranks.append(subprocess.Popen([*command, str(rank)], env=environ(), stdout=log, stderr=subprocess.STDOUT))
        try:
            for process in ranks:
                process.wait(TIMEOUT_MIN * 60)
        finally:
            for process in ranks:
                process.kill()
        logs = [(folder / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    results = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"model"')]
    if options.rounds:
        return print_times(results)
    messages = [line for line in logs[0].splitlines() if "fst loaded" in line or "fst passes" in line]
    print(*map(json.dumps, results), *dict.fromkeys(messages), sep="\n", flush=True)
    is_equal = len(results) == RANKS * len(models) and all(result["differ"] == [] for result in results)
    if not is_equal:
        print(logs[0][-10_000:])
    surplus = [result for result in results if not _reads_what_it_needs(result)]
    return is_equal and not surplus


def _reads_what_it_needs(result: dict[str, Any]) -> bool:
    model, needed = result["model"], result.get("needed_bytes")
    if needed is None or model in STREAMED:
        print(f"{model}: got whole tensors on rank {result['rank']}: {needed is None}")
        return needed is None and model in STREAMED
    limit = SURPLUS_MAX * needed
    if model.endswith("-wide"):
        limit = min(limit, WIDE_MAX * result["parameter_bytes"])
    surplus = [reader for reader in READERS if result[reader] > limit]
    if surplus:
        print(f"{model}: rank {result['rank']} reads more than it needs with {', '.join(surplus)}")
    return not surplus


def free_ports(count: int) -> list[int]:
    """Returns ports that no program of this machine listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listening in sockets:
            listening.bind(("127.0.0.1", 0))
        return [listening.getsockname()[1] for listening in sockets]


def environ() -> dict[str, str]:
    """Returns the environment of a process with a server on the CPU."""
    own = {
        "PYTHONPATH": str(CHECKOUT / "torch_ext"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "SGLANG_NCCL_SO_PATH": "none",
    }
    return os.environ | own


def _run_rank(load: Load, rank: int, models: list[Path]) -> None:
    """Loads models with `auto` and with `fst`, and prints a line for each model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for path in models:
        result: dict[str, Any] = {"model": path.name, "rank": rank}
        try:
            result["parameter_bytes"], expected = _loaded(load, path, "auto")
            differ: set[str] = set()
            for reader in READERS:
                with _counted_fill(rank, path, reader, result):
                    _, found = _loaded(load, path, "fst")
                differ |= {name for name, digest in expected.items() if found.get(name) != digest}
            result |= {"tensors": len(expected), "differ": sorted(differ)}
        except Exception as error:
            traceback.print_exc()
            result["differ"] = [repr(error)]
        print(json.dumps(result), flush=True)


def _loaded(load: Load, path: Path, load_format: str) -> tuple[int, dict[str, str]]:
    """Returns the bytes of the parameters, and a digest of each parameter and buffer."""
    results = []

    def inspect(model: Any) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        results.append((nbytes, {name: digest(tensor) for name, tensor in named}))
        raise LoadedError

    with contextlib.suppress(LoadedError):
        load(str(path), load_format, inspect)
    [result] = results
    return result


@contextlib.contextmanager
def _counted_fill(rank: int, path: Path, reader: str, result: dict[str, Any]) -> Iterator[None]:
    """Counts what fst reads to fill a model, with cold files and one rank after the other within the block."""
    import torch.distributed as dist

    from fst.plugins._recording import Recording

    fill = Recording.fill

    def count(recording: Recording, *arguments: Any) -> None:
        result["needed_bytes"] = needed_pages(recording) * PAGE
        for turn in range(RANKS):
            dist.barrier()
            if turn == rank:
                drop_pages(path)
                before = bytes_read()
                fill(recording, *arguments)
                # System calls read through the page cache, and `auto` reads past it.
                index = READERS.index(reader)
                result[reader] = bytes_read()[index] - before[index]

    with mock.patch.object(Recording, "fill", count), mock.patch.dict(os.environ, FST_READER=reader):
        yield


def _vllm(rank: int, port: int, ranks: int) -> Load:
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # The build for CPUs lacks it.
    _custom_ops.scaled_fp8_quant = _quantized
    count = iter(range(1000))

    def load(path: str, load_format: str, inspect: Callable[[Any], None], begin: Callable[[], None] = int) -> None:
        if path.endswith("-torchao"):
            from torchao.core.config import config_to_dict
            from torchao.quantization import Int8WeightOnlyConfig

            overrides = {"quantization_config_dict_json": json.dumps(config_to_dict(Int8WeightOnlyConfig()))}
            quantization = {"quantization": "torchao", "hf_overrides": overrides}
        else:
            quantization = {"quantization": "fp8_per_tensor"} if path.endswith("-online") else {}
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
            **quantization,
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


def _quantized(tensor: Any, scale: Any = None) -> tuple[Any, Any]:
    import torch

    factor = tensor.abs().max().float() / 448
    return (tensor.float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn), factor.view(1)


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
            attention_backend=os.environ.get("FST_SCAN_ATTENTION", "torch_native"),
            mamba_radix_cache_strategy="no_buffer",
            disable_overlap_schedule=True,
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
