"""Objects of the core that write files, and plans of loads and saves by several ranks."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fst._core.arguments import CastDtype, dtype_arguments
from fst._core.batches import HasBytes
from fst._core.checkpoint import Checkpoint
from fst._core.core_object import CoreObject
from fst._core.errors import methods_translate_errors
from fst._core.secret_key import EncryptionKey


class Writer(CoreObject):
    """Writes tensors to a file one by one.

    Args:
        path: The file or URL.
        metadata: Text for the header.
        tensorizer: Whether to write tensorizer's format, which has no metadata. `write` takes the kind of a tensor and
            the index of its module then.
        key: The key of an encrypted file in either format.
    """

    def __init__(
        self,
        path: str,
        metadata: Mapping[str, str] | None = None,
        tensorizer: bool = False,
        key: EncryptionKey | None = None,
    ) -> None:
        super().__init__("Writer", path, metadata, tensorizer, key)


class Traffic(NamedTuple):
    """Data that a rank sends and receives in the collective of a window.

    Attributes:
        collective: The collective that follows the reads: "none", "exchange" or "gather".
        sent: Bytes sent to each rank. For "gather", a single number: the bytes sent to all ranks.
        received: Bytes received from each rank.
    """

    collective: str
    sent: list[int]
    received: list[int]


class ExchangePlan(CoreObject):
    """Plan of several ranks, which run its windows together. All ranks build the same plan."""

    def windows(self) -> int:
        """Returns the number of windows."""
        return self.call("windows")

    def traffic(self, rank: int, window: int) -> Traffic:
        """Returns what a rank exchanges in a window."""
        return Traffic(*self.call("traffic", (rank, window)))

    def digest(self) -> str:
        """Returns a hash that is equal on two ranks if their plans are equal."""
        return self.call("digest")


@methods_translate_errors
class LoadPlan(ExchangePlan):
    """Plan of a load by several ranks: the byte ranges that each rank reads, and those that ranks exchange.

    Args:
        checkpoint: The checkpoint to load.
        requests: Encoded lists of requested shards.
        list_of_rank: For each rank, the index of its list in `requests`.
        page_caches: For each rank, a number that ranks have in common if they read the files through one page cache,
            or -1.
        strategy: "auto", "own" or "exchange".
        window_bytes: The upper bound for the bytes of a window on one rank.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        requests: Sequence[Tensor],
        list_of_rank: Sequence[int],
        page_caches: Sequence[int],
        strategy: str,
        window_bytes: int,
    ) -> None:
        request = {
            "lengths": list(map(len, requests)),
            "list_of_rank": list_of_rank,
            "caches": page_caches,
            "strategy": strategy,
            "window_bytes": window_bytes,
        }
        numbers = requests[0] if len(requests) == 1 else torch.cat(list(requests))
        super().__init__("LoadPlan", checkpoint, numbers, json.dumps(request))

    def has_exchange(self) -> bool:
        """Returns whether the ranks exchange any data."""
        return self.windows() > 0 and self.traffic(0, 0).collective != "none"

    def cached_items(self, rank: int) -> list[int]:
        """Returns the indices of those requests of a rank whose tensors every rank takes from a page cache."""
        return self.call("cached_items", rank)

    def load_own(self, rank: int, items: Sequence[int], device: torch.device, dtype: CastDtype) -> list[Tensor]:
        """Loads some shards of a rank, given the indices of its requests, without the other ranks."""
        return self._object.load_own(rank, items, device, **dtype_arguments(dtype))


class RanksLoad(CoreObject):
    """Execution of a plan by one rank. The calls are ordered on the current stream.

    Args:
        plan: The plan of all ranks.
        rank: This rank.
        out: For each requested shard a contiguous tensor on `device`, or None for a shard that is not to be loaded.
        device: The device of the tensors.
    """

    def __init__(self, plan: LoadPlan, rank: int, out: Sequence[Tensor | None], device: torch.device) -> None:
        super().__init__("RanksLoad", plan, rank, out, device)


class SavePlan(ExchangePlan):
    """Plan of a save by several ranks: the blocks of files that each rank writes, and the bytes that ranks exchange.

    Every block is written by the rank that writes its first byte.

    Args:
        names: The names of the tensors.
        numbers: The layouts and the tensors, as a 1-d int64 tensor: the count of layouts; the layouts; and for each
            tensor the index of its file, the number of its dtype, the index of its layout, the number of dimensions and
            the sizes of the full tensor. `Layout::decode` in rust/ranks/layout.rs describes layouts.
        metadata: The metadata of each file. An empty dict is left out.
        ranks: The number of ranks.
        window_bytes: The upper bound for the buffers of a rank in bytes. There are two send and two receive buffers.
        has_parts: Whether the files are objects. Then the blocks are their parts.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Tensor,
        metadata: Sequence[Mapping[str, str]],
        ranks: int,
        window_bytes: int,
        has_parts: bool = False,
    ) -> None:
        request = {
            "names": names,
            "metadata": metadata,
            "ranks": ranks,
            "window_bytes": window_bytes,
            "has_parts": has_parts,
        }
        super().__init__("SavePlan", numbers, json.dumps(request, ensure_ascii=False))

    def file_bytes(self) -> list[int]:
        """Returns the length of each file."""
        return self.call("file_bytes")

    def has_digests(self) -> bool:
        """Returns whether a file has digests. Rank 0 seals the headers then."""
        return self.call("has_digests")

    def used_elements(self, rank: int) -> list[tuple[int, int]]:
        """Returns the elements of each local tensor that a rank writes or sends: the first one, and their count."""
        return self.call("used_elements", rank)


class CheckpointSave(CoreObject):
    """Files of a checkpoint that a save replaces, local or in a store.

    After `begin`, the save writes each file at its path in `paths`, or several processes write to the files that
    `create` makes. Then `commit` makes the files the checkpoint. `abandon`, or the deletion of this object, removes
    them otherwise. Only one process calls these methods, even when several write the files.

    Attributes:
        paths: The path or URL at which each file is written.
        permissions_from: The path of a file from which each new file gets its permissions, or an empty text.
        state_path: The path or URL of a file for values that are not tensors.
    """

    def __init__(self) -> None:
        super().__init__("CheckpointSave")
        self.paths: list[str] = []
        self.permissions_from: list[str] = []
        self.state_path = ""

    def begin(self, path: str, count: int, has_index: bool = False, is_shared: bool = False) -> None:
        """Chooses names for the files, and checks that all of them can be created or replaced.

        Args:
            path: The path or URL of the checkpoint. Shards and the index are beside it.
            count: The number of files.
            has_index: Whether there is an index. Several files always have one.
            is_shared: Whether several processes write to a file.
        """
        target = {"path": path, "count": count, "has_index": has_index, "is_shared": is_shared}
        names = self.call("begin", target)
        quoted = urllib.parse.quote if path.startswith("file://") else str

        def beside(name: str) -> str:
            return os.path.join(os.path.dirname(path), quoted(name))

        self.paths = [beside(name) for name in names["files"]]
        self.permissions_from = [beside(name) if name else "" for name in names["permissions_from"]]
        self.state_path = beside(names["state"])

    def create(self, lengths: Sequence[int]) -> list[str]:
        """Creates the files in `paths`, with lengths in bytes, for several processes.

        Returns:
            The ids of the uploads of objects. They are empty for files.
        """
        return self.call("create", lengths)

    def commit(
        self,
        shards: Sequence[Mapping[str, HasBytes]],
        metadata: Mapping[str, str] | None = None,
        parts: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        """Replaces the checkpoint by the complete files, and removes the files of the old one.

        Args:
            shards: The tensors in each file.
            metadata: The metadata of the index.
            parts: The parts of objects that all processes have sent: the index of the object, and the index and the id
                of the part.
        """
        size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        tensors = [list(shard) for shard in shards]
        self.call("commit", {"tensors": tensors, "bytes": size, "metadata": metadata or {}, "parts": parts})

    def abandon(self) -> None:
        """Ends a save that has failed. Removes its files, unless they are the checkpoint."""
        self.call("abandon")


class RanksSave(CoreObject):
    """Execution of a save plan by one rank. The calls are ordered on the stream that was current when it was created.

    Args:
        plan: The plan of all ranks.
        rank: The rank.
        paths: The files, which `CheckpointSave.create` has made.
        uploads: What that has returned for each.
        tensors: The local tensor of the rank for each tensor of the plan, or None where the rank has no elements.
            A 1-d tensor of the used elements may stand for the local tensor. Tensors of other dtypes are cast.
    """

    def __init__(
        self,
        plan: SavePlan,
        rank: int,
        paths: Sequence[str],
        uploads: Sequence[str],
        tensors: Sequence[Tensor | None],
    ) -> None:
        super().__init__("RanksSave", plan, rank, paths, uploads, tensors)
        # Parts of objects that this rank has sent: file, index and id. Known after `finish`.
        self.sent_parts: list[tuple[int, int, str]] = []

    def hashes(self) -> bytes:
        """Returns the hashes of what the rank has written, as text. Empty if no file has digests."""
        return self.call("hashes").encode()

    def seal(self, hashes: Sequence[bytes]) -> None:
        """Writes the headers of files with digests, given the hashes of all other ranks. Only rank 0 does so."""
        self.call("seal", [text.decode() for text in hashes])

    def finish(self) -> None:
        """Flushes what the rank has written to the disk, and closes the files."""
        self.sent_parts = [(file, index, part) for file, index, part in self.call("finish")]


@methods_translate_errors
class FileSave(CoreObject):
    """Save of one file whose tensors are known at the start, and whose values come in parts.

    `append` takes the next values of the file: contiguous tensors on the CPU. `close` gives the file its name, and
    `close(True)` or the deletion of this object discards it.

    Args:
        path: The file or URL.
        likes: Tensors by name. They may be on meta.
        metadata: Text for the header.
        permissions_from: The path of a file from which a new file gets its permissions, or an empty text.
        key: The key of an encrypted file.
    """

    def __init__(
        self,
        path: str,
        likes: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None,
        permissions_from: str,
        key: EncryptionKey | None,
    ) -> None:
        self._names = list(likes)
        super().__init__("FileSave", path, self._names, [*likes.values()], metadata, permissions_from, key)

    def names(self) -> list[str]:
        """Lists the names in the order of the file."""
        return [self._names[index] for index in self._object.order()]
