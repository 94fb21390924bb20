"""Suite of models that transformers converts while it loads them, beside a fill of the same parameters by hand."""

import copy
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

import fst

from . import page_cache, text
from .convert_models import BLOCK, FILE, MODELS, RECIPE, SAVE, SMALL_BYTES, TINY, Model, is_quantized, part_of
from .digest import digest
from .goal import Goal, ratio
from .memory import AnonymousPeak
from .meter import Meter, start_threads
from .page import Part
from .result import Run, reason_of
from .suite import Case, Figures, Option, Suite
from .table import Column, comparison, described, of_median, seconds, size

METHODS = {
    "transformers": "`from_pretrained`",
    "fst": "`from_pretrained` under `fst.patch()`",
    "floor": "parameters filled by hand, or saved by `fst.save_file`",
    "steps": "`fst.save_file`, and `save_pretrained` of as many tiny tensors that writes nothing",
}
# Rounds for one measurement without the patch, which takes seconds.
PLAIN_ROUNDS = 3
# Bounds of the time of `fst.patch()` over that of the fill by hand, and of its peak over the bytes of the parameters.
TIME_BOUNDS = {"qwen3-moe": 1.5, "qwen3-moe-many": 2.0, "deepseek-fp8": 1.5, "gpt-oss": 1.3}
PEAK_BOUND = 1.05
# Bounds for the model that is saved: of its time over a save of the same tensors, also with transformers' own steps,
# and of its memory.
SAVE_BOUNDS = {
    "floor": ("`fst.save_file`", 1.2),
    "steps": ("transformers' own steps and `fst.save_file`", 1.1),
}
SAVE_PEAK_BYTES = 32 << 20
# A file that `fst convert` casts to float16, and the memory that it may take.
COMMAND, COMMAND_BYTES, COMMAND_PEAK_BYTES = "fst-convert", 512 << 20, 64 << 20

# Sizes of a model with as many tensors as the one that is saved, and few numbers.
_FEW_NUMBERS = {"hidden_size": 16, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}

Parameters = dict[str, Tensor]


class Convert(Suite):
    """Loads of models by transformers, by transformers under `fst.patch()` and by hand, in turn."""

    name = "convert"
    options: ClassVar = {
        "workloads": Option([*MODELS, SAVE, COMMAND], [*MODELS, SAVE, COMMAND]),
        "methods": Option([*METHODS], [*METHODS]),
    }

    def start(self, stack: ExitStack) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.args.cache_dir)))
        is_small = self.args.size_bytes < SMALL_BYTES
        self._digests = {}
        for name in self.args.workloads:
            folder = self._folder / name
            if name == COMMAND:
                folder.mkdir()
                _save_command_input(folder / FILE, SMALL_BYTES if is_small else COMMAND_BYTES)
                continue
            made = self.child("convert_models:make_model", name=name, folder=str(folder), is_small=is_small)
            right = self._measure(name, folder, "floor" if name == SAVE else "transformers", 0)
            for figures in (made, right):
                if reason := reason_of(figures):
                    raise RuntimeError(f"{name}: {reason}")
            self.results["workloads"][name], [self._digests[name]] = made, right["digests"]

    def tables(self) -> Iterator[Sequence[Case]]:
        for name in self.args.workloads:
            folder = self._folder / name
            if name == COMMAND:
                yield [Case({"workload": name, "method": "fst"}, partial(self._convert, folder))]
                continue
            yield [
                Case(
                    {"workload": name, "method": method},
                    partial(self._measure_in_turn, name, folder, method),
                    self._digests[name],
                )
                for method in self.args.methods
                if name == SAVE or method != "steps"
            ]

    def _measure_in_turn(self, name: str, folder: Path, method: str, number: int) -> Figures | list[Figures]:
        if method == "transformers" and name in TIME_BOUNDS and number % PLAIN_ROUNDS:
            return []
        return self._measure(name, folder, method, number)

    def _measure(self, name: str, folder: Path, method: str, number: int) -> Figures:
        if name == SAVE:
            return self.child("convert:measure_save", folder=str(folder), method=method)
        return self.child("convert:measure", name=name, folder=str(folder), method=method)

    def _convert(self, folder: Path, number: int) -> Figures:
        return self.child("convert:measure_command", folder=str(folder)) | {"digests": [""]}


def measure(name: str, folder: str, method: str) -> dict[str, Any]:
    """Fills the parameters of a model once, after a tiny model of the same kind."""
    path, model = Path(folder), MODELS[name]
    fill: Callable[[Path], Parameters]
    if method == "floor":
        fill = partial(fill_by_hand, model=model)
    else:
        if method == "fst":
            fst.patch()
        # It takes seconds, which do not count.
        auto = importlib.import_module("transformers").AutoModelForCausalLM
        importlib.import_module("transformers.utils.logging").disable_progress_bar()

        def fill(folder: Path) -> Parameters:
            state: Parameters = auto.from_pretrained(folder, local_files_only=True).state_dict()
            return state

    page_cache.warm(path / FILE)
    start_threads()
    fill(path / TINY)
    watch, meter = AnonymousPeak(), Meter()
    parameters = fill(path)
    figures = meter.figures()
    return {
        "seconds": figures["seconds"],
        "cpu_seconds": figures["cpu_seconds"],
        "peak_bytes": watch.end(),
        "digests": [digest(parameters)],
    }


def measure_save(folder: str, method: str) -> dict[str, Any]:
    """Saves a model once, after a tiny model of the same kind."""
    if method == "fst":
        fst.patch()
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    importlib.import_module("transformers.utils.logging").disable_progress_bar()

    def save(path: Path) -> Callable[[Path], object]:
        model = auto.from_pretrained(path, local_files_only=True)
        if method in ("transformers", "fst"):
            return partial(model.save_pretrained, max_shard_size="100GB")
        recipe, state = json.loads((path / RECIPE).read_text()), model.state_dict()
        parts = {
            name: part_of(state[parameter], index)
            for parameter, (_, sources) in recipe.items()
            for name, index in sources
        }
        steps = _steps_of_save(model) if method == "steps" else None

        def write(target: Path) -> None:
            if steps is not None:
                steps(target)
            fst.save_file(parts, target / FILE)

        return write

    with tempfile.TemporaryDirectory(dir=folder) as target:
        save(Path(folder) / TINY)(Path(target))
        run = save(Path(folder))
        os.sync()
        watch, meter = AnonymousPeak(), Meter()
        run(Path(target))
        figures = meter.figures()
        return {
            "seconds": figures["seconds"],
            "cpu_seconds": figures["cpu_seconds"],
            "peak_bytes": watch.end(),
            "digests": [digest(fst.load_file(Path(target) / FILE))],
        }


def _steps_of_save(model: Any) -> Callable[[Path], None]:
    """Returns `save_pretrained` of a model with the same tensors in other sizes, whose copies take no time."""
    config = copy.deepcopy(model.config)
    for name in _FEW_NUMBERS:
        setattr(config, name, _FEW_NUMBERS[name])
    few = type(model)(config).to(model.dtype)
    modeling = importlib.import_module("transformers.modeling_utils")

    def run(target: Path) -> None:
        with patch.object(modeling, "safe_save_file", lambda *_, **__: None):
            few.save_pretrained(target, max_shard_size="100GB")

    return run


def fill_by_hand(folder: Path, model: Model) -> Parameters:
    """Allocates parameters and fills each once. Those that equal a stored tensor stay mapped."""
    recipe: Mapping[str, Any] = json.loads((folder / RECIPE).read_text())
    file = folder / FILE
    parameters: Parameters = {}
    whole: list[str] = []
    names: list[str] = []
    out: list[Tensor] = []
    codes: dict[str, Tensor] = {}
    for name, (shape, sources) in recipe.items():
        if len(sources) == 1 and not is_quantized(name, model.scheme):
            whole.append(name)
            continue
        parameters[name] = parameter = torch.empty(shape, dtype=torch.bfloat16)
        for source, index in sources:
            part = part_of(parameter, index)
            if is_quantized(source, model.scheme):
                codes[source] = part
            else:
                names.append(source)
                out.append(part)
    parameters |= zip(whole, fst.load_tensors(file, whole), strict=True)
    fst.load_into(file, names, out)
    _dequantize(file, codes, model.scheme)
    return parameters


def _dequantize(file: Path, out: Mapping[str, Tensor], scheme: str) -> None:
    ends = ("_blocks", "_scales") if scheme == "mxfp4" else ("", "_scale_inv")
    loaded = fst.load_tensors(file, [name + end for end in ends for name in out])
    for tensor, codes, scales in zip(out.values(), loaded[: len(out)], loaded[len(out) :], strict=True):
        if scheme == "mxfp4":
            torch.ops.fst.dequantize_into(codes.flatten(2), scales, tensor.transpose(1, 2), "mxfp4")
        else:
            torch.ops.fst.dequantize_into(codes, scales, tensor, "scale", block=[BLOCK, BLOCK])


def _save_command_input(path: Path, size_bytes: int) -> None:
    """Saves tensors of 16 MiB with numbers that float16 can hold."""
    tensor = torch.linspace(-1, 1, 4 << 20)
    fst.save_file({f"layer.{index}": tensor.roll(index) for index in range(size_bytes // tensor.nbytes)}, path)


def measure_command(folder: str) -> dict[str, Any]:
    """Casts a file to float16 by `fst convert`."""
    path = Path(folder)
    page_cache.warm(path / FILE)
    main = importlib.import_module("fst.cli").main
    os.sync()
    watch, meter = AnonymousPeak(), Meter()
    arguments = ["convert", str(path / FILE), str(path / "cast.safetensors"), "--dtype", "float16", "--force"]
    try:
        with open(os.devnull, "w") as null, redirect_stdout(null):
            main(arguments)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"fst convert ended with {end.code}") from end
    figures = meter.figures()
    return {
        "seconds": figures["seconds"],
        "cpu_seconds": figures["cpu_seconds"],
        "peak_bytes": watch.end(),
    }


def introduction(run: Run) -> Iterator[str]:
    yield """\
`AutoModelForCausalLM.from_pretrained` on the CPU, from a warm page cache, with and without `fst.patch()`, and a
program that knows the model: it allocates the parameters and fills each once, by `fst.load_into` and
`fst::dequantize_into`. *CPU* is the time of all threads. *Peak* is the peak of the memory that no file backs, over that
before the load: tensors that stay views of the mapped file do not count. Each measurement has a process of its own,
which has loaded a tiny model of the same kind before. A model that is saved is loaded by `from_pretrained` before. Its
goal counts what transformers and huggingface_hub do for any writer: `save_pretrained` of as many tensors of few
numbers, with a writer that does nothing.
"""


def goals(run: Run) -> Iterator[Goal]:
    for name, bound in TIME_BOUNDS.items():
        own, floor = ({"workload": name, "method": method} for method in ("fst", "floor"))
        if run.some(own):
            title = MODELS[name].title
            yield ratio(run, f"{title}: CPU time over a fill by hand", (own, floor), "cpu_seconds", bound)
            peak, whole = run.median(own, "peak_bytes"), run.workloads[name]["parameter_bytes"]
            share = None if peak is None else peak / whole
            yield Goal(f"{title}: peak over the parameters", share, PEAK_BOUND, text.quotient)
    own, other = ({"workload": "llama", "method": method} for method in ("fst", "transformers"))
    if run.some(own):
        yield ratio(run, f"{MODELS['llama'].title}: CPU time over transformers", (own, other), "cpu_seconds", 1.1)
    if run.some(own := {"workload": SAVE, "method": "fst"}):
        title = "`save_pretrained` of Qwen3-MoE"
        for method, (other, bound) in SAVE_BOUNDS.items():
            over = own, {"workload": SAVE, "method": method}
            yield ratio(run, f"{title}: CPU time over {other}", over, "cpu_seconds", bound)
        yield Goal(f"{title}: peak", run.median(own, "peak_bytes"), SAVE_PEAK_BYTES, text.size)
    if run.some(own := {"workload": COMMAND}):
        title = f"`fst convert` of {text.size(COMMAND_BYTES)} to float16: peak"
        yield Goal(title, run.median(own, "peak_bytes"), COMMAND_PEAK_BYTES, text.size)


def tables(run: Run) -> Iterator[str]:
    for name in (row["workload"] for row in run.names("workload")):
        facts = run.workloads.get(name)
        yield f"## {_title(name, facts)}\n"
        columns = [
            Column("CPU", "cpu_seconds", text.spread),
            Column("time", "seconds", seconds),
            Column("peak", "peak_bytes", size),
        ]
        if facts is not None:
            yield described(facts) + "\n"
            floor = run.median({"workload": name, "method": "floor"}, "cpu_seconds")
            whole = facts["parameter_bytes"]
            columns[2] = Column("peak, over the parameters", "peak_bytes", _size_of(whole))
            if floor:
                columns.insert(1, Column("over a fill by hand", "cpu_seconds", _over(floor)))
        rows = [((METHODS[method],), {"workload": name, "method": method}) for method in METHODS]
        yield from comparison(run, ("",), [row for row in rows if run.some(row[1])], columns)


def _title(name: str, facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "`fst convert` to float16"
    return str(facts["title"])


def _over(floor: float) -> Any:
    return of_median(lambda value: text.quotient(value / floor))


def _size_of(whole: float) -> Any:
    return of_median(lambda value: f"{text.size(value)}, {text.quotient(value / whole)}")


PARTS = {"convert": Part("Conversions", "convert", tables, goals, introduction)}

if __name__ == "__main__":
    from .run import main

    main("convert")
