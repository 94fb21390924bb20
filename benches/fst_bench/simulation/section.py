"""Tables of the simulation in BENCHMARKS.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..text import quotient, seconds, size, table

SIMULATION = "simulation.json"  # in the folder of the raw results

INTRODUCTION = """\
fst's own code runs on the headers of models larger than this machine, on files without data. `docs/ranks.md`
describes the method.

- *CPU*, *sent* and *received* are those of one rank from the call of `fst.load_distributed` until all ranks have
  agreed on the plan: opening, headers, agreement and planning. *Memory* is the growth of its peak. Each is the larger
  figure of rank 0, which reads the headers, and of the last rank. For `fst.save_distributed`, they are those of the
  last rank for describing and checking the tensors, agreement and planning.
- *Read of it* and *sent of it* are the bytes that all ranks read and send over the bytes of the checkpoint. *GPU
  memory* is the largest of any rank: its tensors and buffers.
"""
PLANNING_HEAD = ("layout", "ranks", "CPU", "sent", "received", "memory")
HEAD = ("layout", "ranks", "read of it", "sent of it", "GPU memory", "windows")


def simulation_section(result: Mapping[str, Any]) -> Iterator[str]:
    run = f"`{result['command']}` on {result['date']}, commit {result['commit']}"
    yield f"{run}; buffers of a rank of at most {size(result['window_bytes'])}.\n"
    yield INTRODUCTION
    for what in ("loads", "saves"):
        yield from _titled(f"Planning of {what}", result["models"][result["planned_model"]])
        yield from table(PLANNING_HEAD, [_planning_row(cost) for cost in result[f"planned_{what}"]])
    for name, model in result["models"].items():
        titles = {key: layout["title"] for key, layout in result["layouts"].items() if layout["model"] == name}
        loads = [load for load in result["loads"] if load["layout"] in titles]
        if loads:
            yield from _titled("Data of loads", model)
            yield from table(HEAD, [_row(titles[load["layout"]], load, model["bytes"]) for load in loads])


def _titled(what: str, model: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {what}: {model['title']}\n"
    yield f"{model['bytes'] / 1e9:.1f} GB in {model['tensors']:,} tensors in {model['files']} files.\n"


def _planning_row(cost: Mapping[str, Any]) -> list[str]:
    return [
        cost["layout"],
        str(cost["ranks"]),
        seconds(cost["cpu_seconds"]),
        size(cost["sent_bytes"]),
        size(cost["received_bytes"]),
        size(cost["memory_bytes"]),
    ]


def _row(title: str, load: Mapping[str, Any], model_bytes: int) -> list[str]:
    return [
        title,
        str(load["ranks"]),
        quotient(load["read_bytes"] / model_bytes),
        quotient(load["sent_bytes"] / model_bytes),
        size(load["device_bytes"]),
        str(load["windows"]),
    ]
