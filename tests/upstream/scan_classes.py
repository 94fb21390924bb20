"""Loads a small random model of each class of a server with the server's own loader and with fst.

    python tests/upstream/scan_classes.py vllm [--classes NAME ...] [--out RESULTS]

Servers are installed as by servers.py. A checkpoint comes from the class of transformers, if there is one, or else has
the parameters of the server's own model. Each class is loaded in a process of its own: with `auto`, and with `fst`.
Prints for each class whether fst recorded it, or why it did not, or why the class could not be built here, and fails if
the values of a model differ.
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import environments
import first_loads
from class_checkpoints import digests_of, saved_by_server, saved_by_transformers, with_attributes

import servers

# Seconds for one class.
TIMEOUT_S = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=[*servers.SERVERS])
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="architectures; by default all of the server")
    parser.add_argument("--out", type=Path, help="file to which a JSON object is appended for each class")
    parser.add_argument("--install", nargs="*", default=[], metavar="RELEASE", help="packages that classes need")
    parser.add_argument("--environment", type=Path, help="folder of the server's environment, which is kept")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        sys.exit(_scan(options.server, options.classes, options.out))
    with tempfile.TemporaryDirectory() as folder:
        python = servers.install(servers.SERVERS[options.server], options.environment or Path(folder) / "venv")
        for release in options.install:
            environments.install_release(python, release)
        command = [python, __file__, *sys.argv[1:], "--inside"]
        sys.exit(subprocess.run(command, env=first_loads.environ() | {"VLLM_MLA_DISABLE": "1"}, check=False).returncode)


def _scan(server: str, names: list[str] | None, out: Path | None) -> int:
    """Loads all classes of the installed server. Returns an exit status."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Imports the server once for all processes.
    classes = _CLASSES[server]()
    outcomes: Counter[str] = Counter()
    for title, architectures in classes.items():
        if names and not {title, *architectures} & {*names}:
            continue
        result = {"class": title, **_run(partial(_compare, server, architectures))}
        line = json.dumps(result)
        print(line, flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(line + "\n")
        outcomes[result["outcome"]] += 1
    print(servers.SERVERS[server].release, dict(outcomes))
    return 1 if outcomes["different"] else 0


def _run(compare: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Runs a function in a copy of this process, and returns its result."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        os.setsid()
        log = os.open(os.environ.get("FST_SCAN_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            result = compare()
        except BaseException as error:
            traceback.print_exc()
            result = {"outcome": "not built", "reason": repr(error)}
        os.write(writer, json.dumps({key: value[:4000] for key, value in result.items()}).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], TIMEOUT_S)
    data = b""
    if ready:
        while piece := os.read(reader, 65536):
            data += piece
    os.close(reader)
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(process, signal.SIGKILL)
    os.waitpid(process, 0)
    if not data:
        return {"outcome": "not built", "reason": "time" if not ready else "the process ended"}
    return json.loads(data)


def _compare(server: str, architectures: list[str]) -> dict[str, str]:
    """Loads a model of the first architecture that can be built, with both formats."""
    import torch

    # What no load writes has the same values in both models.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    messages: list[str] = []
    _keep_messages(server, messages)
    folder = Path(tempfile.mkdtemp())
    load = first_loads.LOADERS[server](0, first_loads.free_ports(1)[0], 1)
    errors: list[str] = []
    try:
        for save in (saved_by_transformers, saved_by_server):
            for number, architecture in enumerate(architectures):
                path = folder / f"{save.__name__}-{number}"
                try:
                    source = save(architecture, path, load)
                    expected = with_attributes(path, partial(digests_of, load, path, "auto"))
                except Exception as error:
                    traceback.print_exc()
                    errors.append(f"{save.__name__}: {error!r}")
                    continue
                return _outcome(expected, digests_of(load, path, "fst"), messages) | {"source": source}
        return {"outcome": "not built", "reason": " / ".join(errors)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(expected: dict[str, str], found: dict[str, str], messages: list[str]) -> dict[str, str]:
    differ = [name for name, digest in expected.items() if found.get(name) != digest]
    if differ:
        return {"outcome": "different", "reason": ", ".join(differ[:5])}
    if any("fst loaded" in message for message in messages):
        return {"outcome": "recorded", "reason": ""}
    return {"outcome": "whole tensors", "reason": next((m for m in messages if "fst passes" in m), "no message")}


def _keep_messages(server: str, messages: list[str]) -> None:
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("vllm.fst.plugins.vllm" if server == "vllm" else "fst.plugins._sglang_loader")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())


def _vllm_classes() -> dict[str, list[str]]:
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401
    from vllm.engine import arg_utils  # noqa: F401
    from vllm.model_executor import model_loader  # noqa: F401
    from vllm.model_executor.models import registry

    import fst.plugins.vllm  # noqa: F401

    # vLLM examines each class in a process of its own, which imports everything anew.
    registry._run_in_subprocess = lambda function: function()
    classes: dict[str, list[str]] = {}
    for architecture, (module, name) in registry._VLLM_MODELS.items():
        classes.setdefault(f"{module}.{name}", []).append(architecture)
    return classes


def _sglang_classes() -> dict[str, list[str]]:
    from sglang.srt.model_loader import loader  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs  # noqa: F401

    import fst.plugins._sglang_loader  # noqa: F401

    classes: dict[str, list[str]] = {}
    for architecture, kind in ModelRegistry.models.items():
        classes.setdefault(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}", []).append(architecture)
    return classes


_CLASSES = {"vllm": _vllm_classes, "sglang": _sglang_classes}


if __name__ == "__main__":
    main()
