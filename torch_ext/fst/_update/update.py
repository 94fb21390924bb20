"""Prepared updates."""

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._update.staged_update import StagedUpdate


class Step(NamedTuple):
    """Step of a commit. The tensors of the target with these names are complete after it."""

    names: frozenset[str]
    devices: frozenset[torch.device]
    write: Callable[[], None]


class Plan(NamedTuple):
    """Steps of a commit, and the functions around them.

    Attributes:
        names: Names of all tensors of the target.
        unchanged: Those that keep their values.
        group: Ranks that commit together.
        staged: The staged changes, of which each step stages its own if the update is not atomic.
        check: Raises an error if the update cannot be committed. Nothing has been written then.
        steps: Yields the steps. If the update is not atomic, a step reads and writes.
        after: Runs the hooks of a load, after all tensors are complete.
        is_atomic: Whether all is staged.
    """

    names: Sequence[str]
    unchanged: Collection[str]
    group: Group
    staged: StagedUpdate
    check: Callable[[], None]
    steps: Callable[[], Iterator[Step]]
    after: Callable[[], None]
    is_atomic: bool


class Update:
    """Update of live weights, prepared by `prepare_update`, which waits for its commit.

    As a context manager, it is rolled back at the end of the block if it was not committed. Threads may share it.

    Attributes:
        version: The version of the tensors after the update, or `None`.
        is_delta: Whether the source was deltas.
        unverified: Names of tensors that a sparse patch changed last, which has no checksums, and of tensors of a delta
            of which this rank holds a slice, so that their checksums, which cover whole tensors, were not compared.
    """

    def __init__(
        self, plan: Plan, version: str | None, is_delta: bool, staged_bytes: int, unverified: Sequence[str]
    ) -> None:
        self.version = version
        self.is_delta = is_delta
        self.unverified = list(unverified)
        self._plan = plan
        self._staged_bytes = staged_bytes
        self._process = os.getpid()
        # Held during the writes of a commit and during a rollback. The lock of the caller is taken before it, so that
        # the thread that holds that lock can roll back.
        self._commit_lock = threading.Lock()
        # Guards what follows, and tells waiting threads about changes.
        self._changed = threading.Condition()
        self._state = "prepared"
        # The events of the step that wrote each tensor.
        self._events: dict[str, dict[torch.device, torch.cuda.Event]] = {}
        self._error: BaseException | None = None

    @property
    def staged_bytes(self) -> int:
        """Size of the staged changes in bytes: 0 after the commit, and for an update that is not atomic."""
        return self._staged_bytes if self._state == "prepared" else 0

    def commit(self, lock: contextlib.AbstractContextManager[Any] | None = None, *, background: bool = False) -> None:
        """Writes the new values in place, and sets the version. Addresses do not change.

        Writes on the current stream of each device. Later work on that stream sees the new values; other streams must
        wait for it. An atomic update reads no files now. All ranks of a group call this method.

        Args:
            lock: A context manager that is entered around the writes, such as a lock that requests hold. With ranks,
                it is entered before the ranks agree to commit.
            background: Whether to return at once, and write in a thread. `wait` says when tensors are complete, and
                raises the errors of the commit. Not with several ranks.

        After an error before the first write, the update can be committed again. After the last write, an error of a
        hook or of the lock's exit leaves the tensors with the new version.

        Raises:
            VersionError: Another update or load has written to the tensors since this update was prepared, or the
                target holds other tensors. Nothing was written.
            ValueError: The update was committed or rolled back before, or belongs to the parent of this process.
            RankError: Another rank cannot commit. No rank has written.
            Errors of `load_file`, if the update is not atomic.
        """
        if background:
            if self._plan.group.size > 1:
                raise ValueError("commit with background=True is for one process; ranks commit in the calling thread")
            streams = _current_streams()
            threading.Thread(target=self._commit_in_background, args=(lock, streams), daemon=True).start()
            return
        self._commit(lock)

    def rollback(self) -> None:
        """Frees the staged changes. No tensor changes. Does nothing after a commit."""
        with self._commit_lock:
            if self._state == "prepared":
                self._plan.staged.rollback()
                self._end("rolled back")

    def wait(self, name: str = "") -> None:
        """Waits until tensors hold their new values on the current streams.

        Blocks until the writes are queued, and makes the current stream of each device wait for them. So a program may
        begin with the first layers while the last arrive. After a wait for all tensors, they have the new version.

        Args:
            name: A tensor of the target, or a module with all tensors below it. All tensors by default.

        Raises:
            KeyError: The target has no such tensor or module.
            ValueError: The update was rolled back.
            The error of the commit, if it failed before it wrote these tensors.
        """
        names = self._names_below(name)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_written(names) or self._error is not None or self._state == "rolled back"
            )
            if not self._is_written(names):
                if self._error is not None:
                    raise self._error
                raise ValueError("the update was rolled back; its tensors keep their old values")
            events = [item for each in names for item in self._events.get(each, {}).items()]
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)

    def ready(self, name: str = "") -> bool:
        """Returns whether tensors hold their new values, without waiting. `name` is as in `wait`."""
        names = self._names_below(name)
        with self._changed:
            return self._is_written(names) and all(
                event.query() for each in names for event in self._events.get(each, {}).values()
            )

    def __enter__(self) -> "Update":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.rollback()

    def _names_below(self, name: str) -> list[str]:
        names = [each for each in self._plan.names if not name or each == name or each.startswith(name + ".")]
        if not names:
            raise KeyError(f'the target of the update has no tensor or module "{name}"')
        return names

    def _is_written(self, names: Sequence[str]) -> bool:
        if self._state == "committed":
            return True
        # All tensors get the version after the last of them is written.
        return len(names) < len(self._plan.names) and all(each in self._events for each in names)

    def _commit_in_background(
        self, lock: contextlib.AbstractContextManager[Any] | None, streams: Sequence[torch.cuda.Stream]
    ) -> None:
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            try:
                self._commit(lock)
            except BaseException as error:
                if self._state == "committed":
                    raise
                # `wait` raises it. Before the first write, the update stays prepared.
                self._end(self._state, error)

    def _commit(self, lock: contextlib.AbstractContextManager[Any] | None) -> None:
        if os.getpid() != self._process:
            raise ValueError("the update belongs to the process that prepared it; prepare one after a fork")
        with lock or contextlib.nullcontext(), self._commit_lock, defer_interrupts():
            self._error = None
            try:
                self._plan.group.run_on_all(self._check)
                if self._plan.is_atomic:
                    self._write_on_all()
                else:
                    self._write()
                # All ranks have written. Sets the version of all tensors.
                self._plan.staged.commit()
            except BaseException as error:
                # Before the first write, the caller may try again.
                if self._state == "writing":
                    # Marks the tensors as a mixture of two versions.
                    self._plan.staged.rollback()
                    self._end("failed", error)
                raise
            # All tensors are complete. An error of a hook, or at the exit of the lock, does not undo the commit.
            try:
                self._plan.after()
            finally:
                self._end("committed")

    def _check(self) -> None:
        if self._state != "prepared":
            raise ValueError(f"the update is {self._state}; prepare another one")
        self._plan.check()

    def _write_on_all(self) -> None:
        """Writes, and raises on all ranks if one fails. Ctrl-C does not count, as other ranks may have written."""
        try:
            self._write()
        except BaseException as error:
            self._plan.group.raise_on_any(error)
        else:
            self._plan.group.raise_on_any(None)

    def _write(self) -> None:
        plan = self._plan
        # Checks, and makes other updates of the same tensors fail.
        plan.staged.write(0, 0)
        self._state = "writing"
        if not plan.is_atomic:
            # Marks the tensors as a mixture of two versions.
            plan.staged.stage([], self.version)
        with self._changed:
            self._events.update((name, {}) for name in plan.unchanged)
        for step in plan.steps():
            step.write()
            events = {device: _record(device) for device in step.devices if device.type == "cuda"}
            with self._changed:
                self._events.update(dict.fromkeys(step.names, events))
                self._changed.notify_all()

    def _end(self, state: str, error: BaseException | None = None) -> None:
        with self._changed:
            self._state, self._error = state, error
            self._changed.notify_all()


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _current_streams() -> list[torch.cuda.Stream]:
    """Returns the current streams of all GPUs, the current GPU's last."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    devices = [device for device in range(torch.cuda.device_count()) if device != current]
    return [torch.cuda.current_stream(device) for device in (*devices, current)]
