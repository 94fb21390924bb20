"""Kills, interrupts and stops ranks at random moments of saves and loads, and checks what they leave.

    python tests/stress/kill_ranks.py --rounds 100

In each round up to three processes save or load a checkpoint together, and one of them, or all, get SIGKILL, SIGTERM,
SIGINT or SIGSTOP. All must end in time, those without a signal with a result or an error that tells of a rank. The
directory must hold the old or the new checkpoint, bit for bit, for fst and for safetensors, and the new one if a rank
has returned from a save. `fst clean` must leave its files only. The same save or load by new processes must succeed.

100 rounds take two minutes on two cores. A failure prints the seed of its round, which `--seed SEED --rounds 1`
repeats, maybe after a few attempts, since the moments depend on the load of the machine. The exit code is then 1.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fst
import fst.dcp
from fst import cli

# Timeout of collectives, and the time after the last signal in which all processes must have ended.
COLLECTIVE_SECONDS, LIMIT_SECONDS = 4, 14
# The tensors are exchanged in several windows, and saved in one file or in several shards.
WINDOW_BYTES = 64 << 10
LIMITS = (1 << 30, 300_000, 700_000)
SHAPES = {"rows": (301, 211), "columns": (130, 1000), "plain": (50_000,), "scalar": (), "last": (64, 64, 3)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "plain": Replicate(), "scalar": Replicate(), "last": Shard(2)}
INDEX = "model.safetensors.index.json"
SAVES = ("save_distributed", "in the background", "StorageWriter", "save_file")
LOADS = ("load_sharded", "load_distributed", "stream_sharded")

context = get_context("forkserver")
context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "fst.dcp"])


def tensors_of(version: int) -> dict[str, Tensor]:
    """Returns the values that a version has."""
    made = {"dtype": torch.int32, "generator": torch.Generator().manual_seed(version)}
    return {name: torch.randint(0, 1 << 31, shape, **made) for name, shape in SHAPES.items()}


def act(action: str, state_dict: dict[str, Any], directory: Path, limit: int, version: int) -> dict[str, Tensor] | None:
    """Saves or loads on this rank, and returns the local tensors that it has loaded."""
    window = {"window_bytes": WINDOW_BYTES}
    if action == "save_file":
        return fst.save_file(tensors_of(version), directory / "model.safetensors", max_shard_bytes=limit)
    if action == "StorageWriter":
        values = {"step": version, f"rng.{dist.get_rank()}": {"a": version}}
        writer = fst.dcp.StorageWriter(directory, max_shard_bytes=limit, **window)
        return dcp.save(state_dict | values, storage_writer=writer) and None
    if action in SAVES:
        options = window | {"digests": "blake3" if version % 2 else None, "background": action == "in the background"}
        future = fst.save_distributed(state_dict, directory, limit, **options)
        return future and future.result()
    if action == "load_distributed":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        loaded = fst.load_distributed(directory, mesh, PLACEMENTS, **window)
        return {name: tensor.to_local() for name, tensor in loaded.items()}
    if action == "load_sharded":
        return fst.load_sharded(directory, PLACEMENTS, strategy="exchange", **window)
    return dict(fst.stream_sharded(directory, PLACEMENTS, exchange_bytes=WINDOW_BYTES, **window))


def serve(rank: int, size: int, store: str, pipe: Connection, raises: bool, action: str, *arguments: Any) -> None:
    """Runs an action once the other end of the pipe says so, and sends the outcome."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    mesh = init_device_mesh("cpu", (size,))
    whole = tensors_of(arguments[-1])
    dtensors = {name: distribute_tensor(whole[name], mesh, [placement]) for name, placement in PLACEMENTS.items()}
    local = {name: tensor.to_local() for name, tensor in dtensors.items()}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if raises:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pipe.send("ready")
    pipe.recv()
    try:
        loaded = act(action, dtensors | {"plain": whole["plain"]}, *arguments) or local
        wrong = [name for name, tensor in local.items() if not torch.equal(loaded[name], tensor)]
        outcome = f"wrong values of {wrong}" if wrong else "returned"
    except BaseException as error:
        outcome = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    pipe.send(outcome)


def run(size: int, signals: list[tuple[float, int]], victims: list[int], *arguments: Any) -> tuple[list[str], float]:
    """Runs an action on new processes, some of which get signals. Returns the outcomes and the duration in seconds."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(rank, size, f"{folder}/store", theirs, *arguments)))
            processes[-1].start()
            stack.callback(processes[-1].kill)
            theirs.close()
            pipes.append(ours)
        assert [pipe.recv() for pipe in pipes] == ["ready"] * size
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        for seconds, number in signals:
            time.sleep(seconds)
            for process in [processes[rank] for rank in victims if processes[rank].exitcode is None]:
                os.kill(process.pid, number)
        deadline = time.monotonic() + LIMIT_SECONDS
        outcomes = []
        for pipe in pipes:
            try:
                outcomes.append(pipe.recv() if pipe.poll(max(0, deadline - time.monotonic())) else "has not ended")
            except (EOFError, OSError):
                outcomes.append("has sent nothing")
        for rank, process in enumerate(processes):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
                process.join(1)
                raise AssertionError(f"rank {rank} has not ended; its stack is above; outcomes: {outcomes}")
        return outcomes, time.monotonic() - begin


def check(directory: Path, versions: list[int], is_clean: bool) -> int:
    """Returns which of some versions a directory holds, for fst and for safetensors."""
    index = json.loads((directory / INDEX).read_text()) if (directory / INDEX).exists() else {}
    files = set(index.get("weight_map", {"": "model.safetensors"}).values())
    loaded = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    found = [version for version in versions if all(torch.equal(loaded[n], t) for n, t in tensors_of(version).items())]
    assert found, f"the directory has no whole version of {versions}"
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in fst.load_file(directory).items())
    if state := index.get("metadata", {}).get("fst.state"):
        values = {"step": 0}
        dcp.load(values, storage_reader=fst.dcp.StorageReader(directory), no_dist=True)
        assert values["step"] == found[0], f"the values of version {values} with the tensors of {found}"
    left = set(os.listdir(directory)) - files - {state} - ({INDEX} if index else set())
    assert not (left and is_clean), f"files that are not of the checkpoint: {sorted(left)}"
    return found[0]


def play(seed: int, directory: Path, durations: dict[str, float]) -> str:
    """Plays a round. Returns what has happened, for the summary."""
    choose = random.Random(seed)
    action = choose.choice([*SAVES, *LOADS])
    size = 1 if action == "save_file" else choose.choice((2, 3))
    old, new, last = (3 * seed + i * (action in SAVES) for i in range(3))
    fst.save_file(tensors_of(old), directory / "model.safetensors", max_shard_bytes=choose.choice(LIMITS))
    victims = list(range(size)) if choose.random() < 0.25 else [choose.randrange(size)]
    number = choose.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP))
    signals = [(choose.uniform(0, 1.1 * durations.get(action, 0.3)), number)]
    if number == signal.SIGSTOP:
        # Rarely longer than the others wait.
        seconds = COLLECTIVE_SECONDS + 2 if choose.random() < 0.1 else choose.uniform(0.05, 1)
        signals.append((seconds, choose.choice((signal.SIGCONT, signal.SIGKILL))))
    arguments = [choose.random() < 0.5, action, directory, choose.choice(LIMITS)]
    try:
        told, _ = run(size, signals, victims, *arguments, new)
        assert not any("wrong values" in outcome for outcome in told), told
        found = check(directory, [new] if "returned" in told else [old, new], is_clean=False)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli.main(["clean", str(directory)])
        check(directory, [found], is_clean=True)
        outcomes, durations[action] = run(size, [], [], *arguments, last)
        assert outcomes == ["returned"] * size, f"the next {action}: {outcomes}"
        check(directory, [last], is_clean=True)
        for rank, outcome in enumerate(told):
            # `torch.distributed.checkpoint` has collectives of its own, with errors of gloo.
            is_named = "rank" in outcome or (action == "StorageWriter" and "Error: " in outcome)
            assert rank in victims or outcome == "returned" or is_named, f"no rank in the error of {rank}: {outcome}"
    except Exception as error:
        what = f"{action} of {size} ranks, {signals} to {victims}, {sorted(os.listdir(directory))}"
        raise AssertionError(f"{what}:\n  {type(error).__name__}: {error}") from error
    return f"{number.name} {'load' if action in LOADS else 'new' if found == new else 'old'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="of the first round")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    begin, counts, failed, durations = time.monotonic(), Counter[str](), [], {}
    for seed in range(options.seed, options.seed + options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            try:
                counts[play(seed, Path(directory), durations)] += 1
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed}: {error}", flush=True)
    print(f"{options.rounds} rounds from seed {options.seed} in {time.monotonic() - begin:.0f} s: {dict(counts)}")
    print(f"{len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
