"""Tables of the simulation in BENCHMARKS.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..text import quotient, seconds, size, table

SIMULATION = "simulation.json"  # in the folder of the raw results

INTRODUCTION = """\
These figures are simulated, not measured: fst's own planner runs on the headers of models larger than this machine, on
files without data, with a clock of the rates below. `docs/ranks.md` describes the method and its limits.

- *Read* and *exchange* are the times of either alone. *Total* overlaps the read of each window with the exchange of the
  previous one and the copies of the one before that. *Bottleneck* is the resource at its limit for the longest time.
- *Read of it* is the bytes read over the bytes of the checkpoint. *Sent* is the bytes sent over the bytes that ranks
  keep but did not read. *GPU memory* is the largest of any rank: its tensors and buffers.
- *All read all*: every rank reads the whole checkpoint; ranks of a node share a page cache.
  *Sent to all*: each byte is read once and sent to every rank, needed or not.
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
    rates = [[link, f"{cluster[name] / 1e9:g} GB/s"] for name, link in RATES.items()]
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
