"""Process group of a collective load or save."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fst._core.checkpoint import Checkpoint
from fst._core.interrupts import defer_interrupts
from fst._core.messages import bytes_to_tensor, cut, tensor_to_bytes, text_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Checkpoint = TypeVar("_Checkpoint", bound=Checkpoint)
_Result = TypeVar("_Result")

# Default size of a rank's send and receive buffers, by device type. The first touch of host memory is slow, so its
# buffers are smaller. The GPU's buffers serve groups of hundreds of ranks.
_WINDOW_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}

_CPU = torch.device("cpu")

# A control message begins with its length and a status byte.
_LENGTH_BYTES = 8
# Length of the message of a rank that takes no part in the collectives after this one.
_LEFT = b"\xff" * _LENGTH_BYTES
_SUCCEEDED, _FAILED = b"+", b"-"
# Longest messages that fit the first collective. Longer messages take a second one.
_SHORT_BYTES = 504
_SHORT_BROADCAST_BYTES = (64 << 10) - _LENGTH_BYTES
# Most bytes that each rank sends and receives to gather messages of unequal lengths in one padded collective. Longer
# messages are broadcast in their own lengths.
_PADDED_BYTES_MAX = 1 << 20
# Time for the other ranks to receive the message of a rank that leaves. A process with a collective of gloo in flight
# cannot end, and collectives of ranks that wait for this one for another reason fail then.
_LEAVE_TIMEOUT = timedelta(minutes=5)


# Messages of ranks that left, each with the process that sends it.
_departures: "list[tuple[int, dist.Work]]" = []


@atexit.register
def _send_departures() -> None:
    """Waits until messages are sent. PyTorch aborts a process that ends while gloo sends."""
    for process, work in _departures:
        if process == os.getpid():
            with suppress(Exception):
                work.wait()


class RankError(RuntimeError):
    """Another rank of the group failed or left a stream early, so this rank stopped as well.

    The message names the failed rank and its exception, of which a long text is cut. The failed rank raises that
    exception itself.
    """


@contextmanager
def collective(activity: str) -> Iterator[None]:
    """Raises a `RankError` with the activity if a collective operation fails, as it does once a rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, (RankError, torch.OutOfMemoryError, NotImplementedError)):
            raise
        raise RankError(
            f"a rank of the group has ended or does not answer, while the ranks were {activity}. Its own error, or the "
            f"signal that ended it, says why. The backend's error: {error}"
        ) from error


@dataclass(eq=False)
class Group:
    """Process group of `torch.distributed`, or a single process without one.

    Attributes:
        process_group: The process group; `None` for a single process.
        rank: Rank of this process in the group.
        size: Number of ranks.
        device: Device of the tensors in data collectives: the load's device if the backend supports it.
        control_device: Device of the tensors in control messages. Its type is equal on all ranks, even if they load to
            different devices.
    """

    process_group: "ProcessGroup | None"
    rank: int
    size: int
    device: torch.device
    control_device: torch.device

    @classmethod
    def of(cls, process_group: "ProcessGroup | None", device: torch.device) -> "Group":
        """Returns the group for loads to `device`.

        `None` is the default process group, or a single process if `torch.distributed` is not initialized.
        """
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return cls.alone(device)
        process_group = dist.group.WORLD if process_group is None else process_group
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError(
                "this process is not a rank of the group; call loads and saves only on the ranks that the group was "
                "created with"
            )
        backends = _backends(process_group)
        return cls(
            process_group,
            rank,
            dist.get_world_size(process_group),
            _collective_device(device, backends),
            _collective_device(_CPU, backends),
        )

    @classmethod
    def alone(cls, device: torch.device) -> "Group":
        """Returns a group of this process only, even if `torch.distributed` is initialized."""
        return cls(None, 0, 1, device, _CPU)

    def to(self, device: torch.device) -> "Group":
        """Returns the same group for loads to another device."""
        return Group.alone(device) if self.process_group is None else Group.of(self.process_group, device)

    @property
    def window_bytes(self) -> int:
        """Default size of a rank's send and receive buffers, in bytes."""
        return _WINDOW_BYTES[self.device.type]

    def rank_name(self, rank: int) -> str:
        """Returns the name of a rank of the group for messages."""
        world = rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)
        return f"rank {rank}" if world == rank else f"rank {rank} of the group (rank {world} of the world)"

    def run_on_all(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` on every rank. If it fails on one rank, all ranks raise, the others a `RankError`."""
        return self.gather_results(lambda: (work(), b""))[0]

    def gather_results(
        self, work: Callable[[], tuple[_Result, bytes]], *, is_final: bool = False
    ) -> tuple[_Result, list[bytes]]:
        """Runs `work`, which returns a result and bytes, like `run_on_all`. Also returns all bytes, in rank order.

        With `is_final`, the work cannot be undone, so that Ctrl-C fails no rank, and is raised later.
        """
        result: tuple[_Result, bytes] | None = None
        error: BaseException | None = None
        with defer_interrupts() as interrupts:
            try:
                try:
                    result = work()
                    if not is_final:
                        interrupts.deliver()
                except BaseException as caught:
                    error = caught
                gathered = self.raise_on_any(error, b"" if result is None else result[1])
            finally:
                del error  # As in `raise_on_any`.
        assert result is not None
        return result[0], gathered

    def raise_on_any(self, error: BaseException | None, data: bytes = b"") -> list[bytes]:
        """Raises on all ranks if any rank has an error. Otherwise returns the bytes of all ranks in rank order."""
        try:
            messages = self.all_gather_bytes(_SUCCEEDED + data if error is None else _failure(error))
            if error is not None:
                raise error
        except BaseException as caught:
            if error is not None and caught is not error:
                raise error from caught
            raise
        finally:
            # The exception's traceback holds this frame. A reference from the frame to the exception would be a cycle
            # that keeps all frames of the traceback alive.
            del error
        if failed := [rank for rank, message in enumerate(messages) if message.startswith(_FAILED)]:
            reason = messages[failed[0]].removeprefix(_FAILED).decode(errors="replace")
            raise RankError(f"{self.rank_name(failed[0])} failed{_and_more(failed)}: {reason}")
        return [message.removeprefix(_SUCCEEDED) for message in messages]

    def leave(self, reason: str) -> None:
        """Makes the next message to all ranks raise a `RankError` on all ranks that send one.

        Ranks that leave at the same time raise nothing. Returns at once: this rank does not wait for the others. Over
        gloo, the group fails on all ranks if one of them sends no message within 5 minutes.

        Args:
            reason: A verb and the rest of the sentence about this rank.
        """
        if self.process_group is not None:
            head = _LEFT + cut(reason.encode(errors="replace"), _SHORT_BYTES)
            _, work = self._begin_all_gather(head.ljust(_LENGTH_BYTES + _SHORT_BYTES), _LEAVE_TIMEOUT)
            _departures[:] = [departure for departure in _departures if not departure[1].is_completed()]
            _departures.append((os.getpid(), work))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks in rank order. Lengths may differ."""
        if self.process_group is None:
            return [data]
        # No rank knows the others' lengths before the first collective.
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT_BYTES]
        heads = self._all_gather_equal(head.ljust(_LENGTH_BYTES + _SHORT_BYTES))
        if left := [rank for rank, head in enumerate(heads) if head.startswith(_LEFT)]:
            reason = heads[left[0]].removeprefix(_LEFT).rstrip().decode(errors="replace")
            raise RankError(f"{self.rank_name(left[0])} {reason}{_and_more(left)}")
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        longest = max(lengths)
        messages = [head[_LENGTH_BYTES:] for head in heads]
        if longest * self.size > _PADDED_BYTES_MAX:
            # Padding would cost ranks times the longest message, even if one rank alone has a long one.
            sources = [rank for rank, length in enumerate(lengths) if length > _SHORT_BYTES]
            own = bytes_to_tensor(data)
            tensors = [own if rank == self.rank else own.new_empty(lengths[rank]) for rank in sources]
            for rank, tensor in zip(sources, self.broadcast_all(tensors, sources), strict=True):
                messages[rank] = tensor_to_bytes(tensor)
        elif longest > _SHORT_BYTES:
            messages = self._all_gather_equal(data.ljust(longest))
        return [message[:length] for message, length in zip(messages, lengths, strict=True)]

    @collective("exchanging messages")
    def exchange(self, data: Sequence[Tensor]) -> list[Tensor]:
        """Sends a message to each rank, and returns the message of each rank. No byte is padded or copied to others.

        Args:
            data: One-dimensional uint8 tensors on the CPU, of any lengths, in rank order.
        """
        if self.process_group is None:
            return list(data)
        own = torch.tensor([len(tensor) for tensor in data], device=self.control_device)
        lengths = torch.empty_like(own)
        dist.all_to_all_single(lengths, own, group=self.process_group)
        sent, received = own.tolist(), lengths.tolist()
        filled = [tensor for tensor in data if len(tensor) > 0]
        message = (filled[0] if len(filled) == 1 else torch.cat(list(data))).to(self.control_device)
        buffer = torch.empty(sum(received), dtype=torch.uint8, device=self.control_device)
        dist.all_to_all_single(buffer, message, received, sent, group=self.process_group)
        return list(buffer.to(_CPU).split(received))

    def gather(self, data: Tensor) -> list[Tensor]:
        """Returns the data of all ranks on rank 0, and empty tensors on the others. Otherwise as `exchange`."""
        return self.exchange([data] + [data[:0]] * (self.size - 1))

    def broadcast(self, data: Tensor | None, source: int) -> Tensor:
        """Returns the bytes of rank `source`: a one-dimensional uint8 tensor on the CPU. Other ranks pass `None`."""
        if self.process_group is None:
            assert data is not None
            return data
        # As in `all_gather_bytes`.
        head = torch.zeros(_LENGTH_BYTES + _SHORT_BROADCAST_BYTES, dtype=torch.uint8, device=_CPU)
        if data is not None:
            head[:_LENGTH_BYTES].view(torch.int64).fill_(len(data))
            head[_LENGTH_BYTES:][: len(data)] = data[:_SHORT_BROADCAST_BYTES]
        [head] = self.broadcast_all([head], [source])
        length = int(head[:_LENGTH_BYTES].view(torch.int64))
        if length <= _SHORT_BROADCAST_BYTES:
            return head[_LENGTH_BYTES:][:length]
        whole = torch.empty(length, dtype=torch.uint8, device=_CPU) if data is None else data
        [whole] = self.broadcast_all([whole], [source])
        return whole

    def broadcast_text(self, text: str | None, source: int) -> str:
        """Returns the text of rank `source`. Other ranks pass `None`."""
        data = None if text is None else bytes_to_tensor(text.encode())
        return tensor_to_bytes(self.broadcast(data, source)).decode()

    @collective("exchanging messages")
    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Returns for each flag whether any rank has set it. All ranks pass equally many flags."""
        if self.process_group is None or not flags:
            return list(flags)
        united = torch.tensor(flags, dtype=torch.uint8, device=self.control_device)
        dist.all_reduce(united, dist.ReduceOp.MAX, self.process_group)
        return [bool(flag) for flag in united.tolist()]

    @collective("exchanging messages")
    def broadcast_all(self, data: Sequence[Tensor], sources: Sequence[int]) -> list[Tensor]:
        """Broadcasts tensors on the CPU, each from its source, in flight at once.

        The tensors of other sources have the right shape and dtype, and may be overwritten.
        """
        moved = [tensor.to(self.control_device) for tensor in data]
        if self.process_group is not None:
            works = [
                dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
                for tensor, source in zip(moved, sources, strict=True)
            ]
            for work in works:
                work.wait()
        return [tensor.to(_CPU) for tensor in moved]

    @collective("exchanging messages")
    def _all_gather_equal(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, whose lengths are equal."""
        rows, work = self._begin_all_gather(data)
        work.wait()
        return list(map(tensor_to_bytes, rows.to(_CPU)))

    def _begin_all_gather(self, data: bytes, timeout: timedelta | None = None) -> "tuple[Tensor, dist.Work]":
        """Begins to gather bytes of equal lengths. Returns a row for each rank, filled once the work is complete.

        On the CPU, `timeout` replaces the group's.
        """
        # Explicit devices, since the caller may have set another default device.
        own = bytes_to_tensor(data).to(self.control_device)
        rows = torch.empty((self.size, len(data)), dtype=torch.uint8, device=self.control_device)
        if self.control_device.type == "cpu":
            # The ring all-gather of gloo wakes each rank once for each other rank, and takes twice as long.
            repeated = own.repeat(self.size)
            if timeout is None or self.process_group is None:
                work = dist.all_to_all_single(rows.view(-1), repeated, group=self.process_group, async_op=True)
            else:
                options = dist.AllToAllOptions()
                options.timeout = timeout
                work = self.process_group.alltoall_base(rows.view(-1), repeated, [], [], options)
        else:
            work = dist.all_gather_into_tensor(rows.view(-1), own, group=self.process_group, async_op=True)
        return rows, work


@defer_interrupts()
def open_on_all(
    group: Group,
    open_checkpoint: Callable[[Tensor | None], _Checkpoint],
    work: Callable[[_Checkpoint], tuple[_Result, bytes]],
) -> tuple[_Result, list[bytes]]:
    """Opens a checkpoint on all ranks, and does with it what `Group.gather_results` does.

    Only rank 0 reads the headers and sends them to the others, whose `open_checkpoint` gets them in place of `None`.
    """
    opened: list[_Checkpoint] = []
    errors: list[BaseException] = []
    headers = None
    if group.rank == 0:
        try:
            opened.append(open_checkpoint(None))
            headers = opened[0].headers()
        except BaseException as caught:
            errors.append(caught)
            # The headers of a file are never empty.
            headers = torch.empty(0, dtype=torch.uint8, device=_CPU)
    received = group.broadcast(headers, 0)

    def open_and_work() -> tuple[_Result | None, bytes]:
        if errors:
            raise errors.pop()
        if len(received) == 0:
            # Rank 0 failed, so all ranks raise.
            return None, b""
        return work(opened[0] if opened else open_checkpoint(received))

    result, gathered = group.gather_results(open_and_work)
    assert result is not None
    return result, gathered


def _backends(process_group: "ProcessGroup | None") -> dict[str, str]:
    """Returns the backend of a process group for each device type."""
    pairs = (item.partition(":") for item in dist.get_backend_config(process_group).split(","))
    return {device: backend for device, _, backend in pairs}


def _collective_device(device: torch.device, backends: dict[str, str]) -> torch.device:
    """Returns `device` if the backends transfer its tensors, or else a device that they support."""
    # gloo registers for GPUs, but has no all-to-all of GPU tensors.
    if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
        return device
    return _CPU if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())


def _and_more(ranks: Sequence[int]) -> str:
    return f", as did {len(ranks) - 1} more" if len(ranks) > 1 else ""


def _failure(error: BaseException) -> bytes:
    """Returns the message of a rank with an error. It is short: all ranks send as many bytes as the longest message."""
    return _FAILED + cut(text_of(error).encode(errors="replace"))
