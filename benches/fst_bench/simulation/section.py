"""Tables of the simulation in BENCHMARKS.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..text import quotient, seconds, size, table

SIMULATION = "simulation.json"  # in the folder of the raw results

INTRODUCTION = """\
These figures are counted, not measured: fst's own planner runs on the headers of models larger than this machine, on
files without data. `docs/ranks.md` describes the method.

- *Read of it* and *sent of it* are the bytes read and sent over the bytes of the checkpoint. *GPU memory* is the
  largest of any rank: its tensors and buffers.
"""
HEAD = ("ranks", "read of it", "sent of it", "GPU memory", "windows", "planned in")


def simulation_section(result: Mapping[str, Any]) -> Iterator[str]:
    run = f"`{result['command']}` on {result['date']}, commit {result['commit']}"
    yield f"{run}; buffers of a rank of at most {size(result['window_bytes'])}.\n"
    yield INTRODUCTION
    for name, layout in result["layouts"].items():
        model = result["models"][layout["model"]]
        yield f"### {model['title']}, {layout['title']}\n"
        yield f"{model['bytes'] / 1e9:.1f} GB in {model['tensors']:,} tensors in {model['files']} files.\n"
        loads = [load for load in result["loads"] if load["layout"] == name]
        yield from table(HEAD, [_row(load, model["bytes"]) for load in loads])


def _row(load: Mapping[str, Any], model_bytes: int) -> list[str]:
    return [
        str(load["ranks"]),
        quotient(load["read_bytes"] / model_bytes),
        quotient(load["sent_bytes"] / model_bytes),
        size(load["device_bytes"]),
        str(load["windows"]),
        seconds(load["plan_seconds"]),
    ]
