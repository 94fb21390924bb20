"""First load of a server's model: each rank reads the bytes that it keeps."""

import time
from collections.abc import Callable

import torch
from torch.nn import Module

from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst.plugins._options import Options
from fst.plugins._recording import Recording, online_method
from fst.plugins._weights import ServerGroup, progress_bar


def load_recorded(
    model: Module,
    load: Callable[[Recording | None], object],
    options: Options,
    *,
    group: Callable[[], ServerGroup],
    bar: bool,
    log: Callable[[str], object],
    obstacle: str = "",
) -> None:
    """Loads the weights of a model by a record of its `load_weights`, or as a stream of whole tensors.

    All ranks of the group take the same way. An error on one of them ends the load on all.

    Args:
        model: The model, without weights.
        load: Calls the model's `load_weights` with the tensors of a recording, or with `None` with a stream.
        options: Options of the load format.
        group: Returns the ranks that load at the same time.
        bar: Whether to show a progress bar.
        log: Takes a message about the way that was taken.
        obstacle: Why the load is streamed, if the server's configuration requires it.
    """
    if options.ranks != "together":
        # Also between two collectives, Ctrl-C must not end one rank alone.
        with defer_interrupts():
            message, is_loaded = _load_parts(model, load, options, _ranks(group()), bar, obstacle)
        log(message)
        if is_loaded:
            return
    load(None)


def _load_parts(
    model: Module,
    load: Callable[[Recording | None], object],
    options: Options,
    ranks: Group,
    bar: bool,
    obstacle: str,
) -> tuple[str, bool]:
    """Loads what the ranks keep, if the model can be recorded on all of them.

    Returns a message about the way, and whether the weights are loaded.
    """
    title = type(model).__name__
    recordings: list[Recording] = []

    def record() -> tuple[None, bytes]:
        reason = obstacle or online_method(model)
        if not reason:
            with defer_interrupts() as interrupts:
                recording = Recording(model, interrupts.deliver, shares_disk=ranks.size > 1)
                recordings.append(recording)
                reason = recording.run(lambda: load(recording))
        return None, reason.encode(errors="replace")

    started = time.perf_counter()
    try:
        _, reasons = ranks.gather_results(record)
    except BaseException:
        for recording in recordings:
            recording.restore()
        raise
    for rank, reason in enumerate(reasons):
        if reason:
            for recording in recordings:
                recording.restore()
            where = f" on {ranks.rank_name(rank)}" if ranks.size > 1 else ""
            because = f"because{where} {reason.decode(errors='replace')}"
            return f"fst passes whole tensors to {title}, {because}", False
    [recording] = recordings
    own, total = recording.own_bytes(), recording.total_bytes
    recorded = time.perf_counter()
    ranks.run_on_all(lambda: _fill(recording, own, options, bar))
    message = (
        f"fst loaded {own:,} of {total:,} bytes into {title}: {recorded - started:.2f} s to record its load_weights, "
        f"{time.perf_counter() - recorded:.2f} s to load"
    )
    return message, True


def _ranks(group: ServerGroup) -> Group:
    cpu = torch.device("cpu")
    return Group.of(group.cpu_group, cpu) if group.world_size > 1 else Group.alone(cpu)


def _fill(recording: Recording, nbytes: int, options: Options, bar: bool) -> None:
    with (
        defer_interrupts() as interrupts,
        progress_bar(nbytes, bar) as progress,
    ):

        def advance(nbytes: int) -> None:
            progress.update(nbytes)
            interrupts.deliver()

        recording.fill(advance, options.window_bytes)
