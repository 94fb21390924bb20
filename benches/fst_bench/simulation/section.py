"""The tables of the simulation in BENCHMARKS.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..text import quotient, seconds, size, table

SIMULATION = "simulation.json"  # in the folder of the raw results

INTRODUCTION = """\
Not measured, but planned and counted: fst's own planner with the headers of models that are larger than this machine,
on files without data, and a clock with the rates below. How it is done, and what it cannot say: `docs/ranks.md`.

- *Read* and *exchange* are what either would take alone; *total* has the reading of each window beside the exchange of
  the one before, and the placing of the one before that. *Bottleneck* is what is at its limit for most of that time.
- *Read of it* is what the group reads over what the checkpoint has, *sent* what crosses links over what ranks keep and
  have not read themselves. *GPU memory* is that of the rank with the most: its tensors, and the buffers.
- *All read all*: every rank reads the whole checkpoint, and what one rank of a node reads is there for the others.
  *Sent to all*: each byte is read once and goes to every rank, whatever that keeps.
"""

RATES = {
    "storage_bytes_per_second": "file system, all nodes together",
    "node_storage_bytes_per_second": "file system to one node",
    "pcie_bytes_per_second": "PCIe of one GPU",
    "nvlink_bytes_per_second": "NVLink of one GPU, each way",
    "node_network_bytes_per_second": "network of one node, each way",
    "memory_bytes_per_second": "copies inside one GPU",
}


def simulation_section(result: Mapping[str, Any]) -> Iterator[str]:
    cluster = result["cluster"]
    yield f"`{result['command']}` on {result['date']}, commit {result['commit']}.\n"
    yield INTRODUCTION
    rates = [[told, f"{cluster[name] / 1e9:g} GB/s"] for name, told in RATES.items()]
    latency = ["a collective, beyond its bytes", f"{cluster['collective_seconds'] * 1e6:g} us"]
    ranks = ["ranks of a node, a GPU each", str(cluster["node_ranks"])]
    buffers = ["buffers of a rank, at most", size(result["window_bytes"])]
    yield from table(["", "given"], [*rates, latency, ranks, buffers])
    for name, layout in result["layouts"].items():
        model = result["models"][layout["model"]]
        yield f"### {model['title']}, {layout['title']}\n"
        yield f"{model['bytes'] / 1e9:.1f} GB in {model['tensors']:,} tensors in {model['files']} files.\n"
        loads = [load for load in result["loads"] if load["layout"] == name]
        yield from table(HEAD, [_row(load) for load in loads])


HEAD = [
    "ranks",
    "read",
    "exchange",
    "**total**",
    "bottleneck",
    "all read all",
    "sent to all",
    "read of it",
    "sent",
    "GPU memory",
    "windows",
    "planned in",
]


def _row(load: Mapping[str, Any]) -> list[str]:
    fst = load["seconds"]
    return [
        str(load["ranks"]),
        seconds(fst["read"]),
        seconds(fst["exchange"]),
        f"**{seconds(fst['total'])}**",
        fst["bottleneck"],
        seconds(load["everyone_reads_all"]["total"]),
        seconds(load["sent_to_all"]["total"]),
        quotient(load["read_share"]),
        "-" if load["sent_share"] is None else quotient(load["sent_share"]),
        size(load["device_bytes"]),
        str(load["windows"]),
        seconds(load["plan_seconds"]),
    ]
