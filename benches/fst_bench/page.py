"""Pages of figures: the parts of a report, and the tables of the decisions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .goal import Goal
from .result import Run
from .text import size, table


class Part(NamedTuple):
    """Part of a report.

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

    def record(self, run: Run) -> dict[str, Any]:
        """Returns facts, goals and tables as values for JSON, or nothing if nothing was measured for the part."""
        tables = [line for text in self.tables(run) for line in text.splitlines()]
        facts = {"title": self.title} | {name: run.facts[name] for name in ("command", "date", "commit")}
        introduction = [line for text in self.introduction(run) for line in text.splitlines()]
        lines = {"machine": list(machine_lines(run.facts)), "tables": [*introduction, *tables]}
        goals = [goal.row for goal in self.goals(run)]
        return facts | {"rounds": run.rounds(), "goals": goals} | lines if tables else {}


def details(record: Mapping[str, Any]) -> str:
    """Returns a page with all figures of a record."""
    ran = "`{command}` on {date}, commit {commit}; medians of {rounds} rounds.".format(**record)
    goals = table(["goal", "fst", "bound", "verdict"], record["goals"]) if record["goals"] else ()
    return "\n".join([f"# {record['title']}\n", ran, *record["machine"], "", *goals, *record["tables"]]).strip() + "\n"


def decision_figures(decisions: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a page with the tables of all decisions, a section for each."""
    lines = ["# Figures of decisions\n", "Measured once, to compare alternatives. Each table has its date.\n"]
    for name, tables in decisions.items():
        lines.append(f"## {name}\n\nFigures of [{name}.md](/decisions/{name}.md).\n")
        for each in tables:
            facts = "{date}, {machine}. {method}".format(**each)
            lines += [f"### {each['title']}\n", facts, "", *table(each["columns"], each["rows"])]
    return "\n".join(lines)


def machine_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a run ran on."""
    machine = facts["machine"]
    load = f"{facts['load_average_before']:.1f} before and {facts.get('load_average_after', 0):.1f} after"
    where = "a virtual machine" if machine["virtual machine"] else "a physical machine"
    yield (
        f"{machine['processor']}, {machine['cores']} cores of {where}, {size(machine['memory_bytes'])} of memory, "
        f"Linux {machine['kernel']}, {machine['file system']} on {machine['disk']}, Python {machine['python']}, "
        f"PyTorch {machine['torch']} with {machine['torch_threads']} threads. Load average {load}."
    )
    if "gpu" in machine:
        yield f"{machine['gpu']}, CUDA {machine['cuda']}, driver {machine['gpu driver']}."
