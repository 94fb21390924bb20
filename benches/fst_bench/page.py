"""Parts of BENCHMARKS.md."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .goal import Goal
from .result import Run
from .text import size, table


class Part(NamedTuple):
    """Part of the page.

    Attributes:
        title: Title of the part.
        results: Name of the file of results.
        tables: Returns the lines of the tables, or none if nothing was measured for them.
        goals: Returns all goals, including those that the run did not measure.
        introduction: Returns lines before the goals.
    """

    title: str
    results: str
    tables: Callable[[Run], Iterator[str]]
    goals: Callable[[Run], Iterable[Goal]] = lambda run: ()
    introduction: Callable[[Run], Iterator[str]] = lambda run: iter(())

    def lines(self, run: Run) -> list[str]:
        """Returns the lines of the part, or none if nothing was measured for it."""
        tables = list(self.tables(run))
        if not tables:
            return []
        rows = [goal.row for goal in self.goals(run)]
        goals = ["### Goals\n", *table(["goal", "fst", "bound", "verdict"], rows)] if rows else []
        return [f"## {self.title}\n", *machine_lines(run.facts, run.rounds()), *self.introduction(run), *goals, *tables]


def machine_lines(facts: Mapping[str, Any], rounds: int | str) -> Iterator[str]:
    """Yields the command of a run, and what it ran on."""
    machine = facts["machine"]
    yield f"`{facts['command']}` on {facts['date']}, commit {facts['commit']}; medians of {rounds} rounds."
    load = f"{facts['load_average_before']:.1f} before and {facts.get('load_average_after', 0):.1f} after"
    where = "a virtual machine" if machine["virtual machine"] else "a physical machine"
    yield (
        f"{machine['processor']}, {machine['cores']} cores of {where}, {size(machine['memory_bytes'])} of memory, "
        f"Linux {machine['kernel']}, {machine['file system']} on {machine['disk']}, Python {machine['python']}, "
        f"PyTorch {machine['torch']} with {machine['torch_threads']} threads. Load average {load}."
    )
    if "gpu" in machine:
        yield f"{machine['gpu']}, CUDA {machine['cuda']}, driver {machine['gpu driver']}."
    yield ""
