"""The ranks that load together."""

import ctypes
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fst._distributed.interrupts import interrupts_held

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")

# The most memory of a rank for what is on its way between ranks, unless somebody asks for less or more. The host's is
# slow to touch for the first time, and the GPU's serves groups of hundreds.
_WINDOW_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}

_CPU = torch.device("cpu")

# How messages between ranks begin: how long it is, and whether the rank has failed.
_LENGTH_BYTES = 8
_FINE, _FAILED = b"+", b"-"
# What a message holds that needs one collective.
_SHORT_BYTES = 1016


class RankError(RuntimeError):
    """Another rank of the group failed, so this one gave up, too. The message names the rank and its exception.

    The rank that failed raises its own exception.
    """


class Ranks:
    """A process group of `torch.distributed`, or this process alone.

    Attributes:
        group: The process group; None where this process is alone without one.
        rank: The place of this process in it.
        size: The number of ranks.
        device: Where tensors have to be for the group to move what a load moves.
    """

    def __init__(
        self, group: "ProcessGroup | None", rank: int, size: int, device: torch.device, control: torch.device
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.device = device
        # Where small messages have to be. All ranks choose the same, also while their loads differ.
        self.control = control

    @classmethod
    def of(cls, group: "ProcessGroup | None", device: torch.device) -> "Ranks":
        """The ranks of a group, for loads to `device`.

        None is the world, or this process alone where `torch.distributed` is not in use.

        Raises:
            ValueError: This process is not in the group.
        """
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls.alone(device)
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                "this process is not a rank of the group, and only ranks load with it; call it on the ranks that "
                "were named when the group was made"
            )
        backends = _backends(group)
        return cls(group, rank, dist.get_world_size(group), _carrier(device, backends), _carrier(_CPU, backends))

    @property
    def window_bytes(self) -> int:
        """How much memory a load by these ranks takes for what is on its way, unless it is told."""
        return _WINDOW_BYTES[self.device.type]

    @classmethod
    def alone(cls, device: torch.device) -> "Ranks":
        """This process alone, whether `torch.distributed` is in use or not."""
        return cls(None, 0, 1, device, _CPU)

    def to(self, device: torch.device) -> "Ranks":
        """The same ranks, for loads to another device."""
        return Ranks.alone(device) if self.group is None else Ranks.of(self.group, device)

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Does `work`, and raises on every rank where it fails on one.

        Raises:
            RankError: It failed on another rank.
            And what `work` raises.
        """
        return self.tell(lambda: (work(), b""))[0]

    def tell(self, work: Callable[[], tuple[_Result, bytes]]) -> tuple[_Result, list[bytes]]:
        """Does `work`, which has a result and something to tell. Gives the result, and what each rank told.

        Raises:
            RankError: It failed on another rank.
            And what `work` raises.
        """
        result: tuple[_Result, bytes] | None = None
        error: BaseException | None = None
        with interrupts_held() as interrupts:
            try:
                try:
                    result = work()
                    interrupts.let_out()
                except BaseException as caught:
                    error = caught
                told = self.agree(error, b"" if result is None else result[1])
            finally:
                del error  # As in `agree`.
        assert result is not None
        return result[0], told

    def agree(self, error: BaseException | None, data: bytes = b"") -> list[bytes]:
        """What each rank told. Raises where any has an error: there the error itself, on other ranks a RankError."""
        try:
            told = self.share(_FINE + data if error is None else _FAILED + _text_of(error))
            if error is not None:
                raise error
        except BaseException as caught:
            if error is not None and caught is not error:
                raise error from caught
            raise
        finally:
            # This frame is part of the exception's traceback: the exception would keep itself alive, and with it all
            # that the frames of the traceback hold.
            del error
        if failed := [rank for rank, text in enumerate(told) if text.startswith(_FAILED)]:
            others = f", as did {len(failed) - 1} more" if len(failed) > 1 else ""
            reason = told[failed[0]].removeprefix(_FAILED).decode(errors="replace")
            raise RankError(f"{self.name(failed[0])} failed{others}: {reason}")
        return [text.removeprefix(_FINE) for text in told]

    def name(self, rank: int) -> str:
        """A rank of the group as people are told of it."""
        world = rank if self.group is None else dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if world == rank else f"rank {rank} of the group (rank {world} of the world)"

    def share(self, data: bytes) -> list[bytes]:
        """What each rank gave, in their order."""
        if self.group is None:
            return [data]
        # A long message has another collective to itself, since nobody knows before how long it is.
        short = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT_BYTES]
        told = self._gather(short.ljust(_LENGTH_BYTES + _SHORT_BYTES))
        lengths = [int.from_bytes(text[:_LENGTH_BYTES], "little") for text in told]
        longest = max(lengths)
        texts = self._gather(data.ljust(longest)) if longest > _SHORT_BYTES else [text[_LENGTH_BYTES:] for text in told]
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def broadcast(self, data: Tensor | None, source: int) -> Tensor:
        """The bytes, uint8 in one dimension on the CPU, that the rank `source` gave; the other ranks give None."""
        if self.group is None:
            assert data is not None
            return data
        length = torch.tensor([0 if data is None else len(data)], device=self.control)
        dist.broadcast(length, group=self.group, group_src=source)
        moved = torch.empty(int(length), dtype=torch.uint8, device=_CPU) if data is None else data
        moved = moved.to(self.control)
        dist.broadcast(moved, group=self.group, group_src=source)
        return moved.to(_CPU)

    def _gather(self, data: bytes) -> list[bytes]:
        """What each rank gave, as long on all of them."""
        # Tensors say where they are, since the caller may have another default device.
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.control)
        rows = torch.empty((self.size, len(data)), dtype=torch.uint8, device=self.control)
        dist.all_gather_into_tensor(rows.view(-1), given, group=self.group)
        # PyTorch has no other way to bytes that is quick and needs no NumPy.
        return [ctypes.string_at(row.data_ptr(), len(data)) for row in rows.to(_CPU)]


def _backends(group: "ProcessGroup | None") -> dict[str, str]:
    """For each type of device that the group takes tensors of, the backend that moves them."""
    pairs = (item.partition(":") for item in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _carrier(device: torch.device, backends: dict[str, str]) -> torch.device:
    """`device` if the group moves its tensors, or else one from which it does."""
    # gloo registers for GPUs but has no all-to-all of their tensors.
    if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
        return device
    return _CPU if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())


def _text_of(error: BaseException) -> bytes:
    # Some exceptions have no text, or fail to give it; this always gives their type.
    lines = traceback.TracebackException(type(error), error, None).format_exception_only()
    return "".join(lines).strip().encode(errors="replace")
