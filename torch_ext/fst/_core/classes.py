"""Typed wrappers of the classes `torch.classes.fst.*` that raise Python exceptions.

The rest of the package uses these, and never `torch.classes.fst`.
"""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import contextlib
import json
import os
import urllib.parse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.arguments import Dtype, dtype_arguments
from fst._core.batches import HasBytes
from fst._core.core_object import CoreObject
from fst._core.errors import methods_translate_errors
from fst._core.index_range import FlatRegions, IndexRange, flatten
from fst._core.loads import Loads
from fst._core.verify import permits_unverified, warn

Device = torch.device | str

# Size of a key of encrypted files in bytes.
KEY_BYTES = 32

_CPU = torch.device("cpu")

# Size of a window that is large enough for any checkpoint, in bytes.
UNBOUNDED = 2**63 - 1


class TensorInfo(NamedTuple):
    """Header entry of a tensor.

    Attributes:
        dtype: The dtype's name in the header: "F32", "BF16", ...
        shape: The shape in the header.
        nbytes: The size of the data in bytes. 0 for a tensor that is stored without data, and loads as zeros.
        begin: The offset of the data in the file.
        kind: In tensorizer's format 0 for a parameter, 1 for a buffer and 2 for a tensor of a state_dict. -1 in a
            safetensors file.
    """

    dtype: str
    shape: list[int]
    nbytes: int
    begin: int
    kind: int


@methods_translate_errors
class EncryptionKey(CoreObject):
    """Secret key of encrypted files, which the core overwrites in memory at the end.

    `label` is text that new files show to everybody.
    """

    @classmethod
    def of_bytes(cls, key: bytes, label: str = "") -> "EncryptionKey":
        """Copies the 32 bytes of a key."""
        with _secret(key) as secret:
            return cls("EncryptionKey", secret, label)

    @classmethod
    def of_passphrase(cls, passphrase: bytes, passes: int, memory_bytes: int, label: str) -> "EncryptionKey":
        """Copies a passphrase. New files have the given limits of Argon2id."""
        with _secret(passphrase) as secret:
            return cls.of(torch.classes.fst.EncryptionKey.of_passphrase(secret, passes, memory_bytes, label))

    @classmethod
    def of_file(cls, path: str, label: str) -> "EncryptionKey":
        """Reads a key from a local file."""
        return cls.of(torch.classes.fst.EncryptionKey.of_file(path, label))

    def for_save(self) -> "EncryptionKey":
        """Returns the key for the files of one save, which share one salt if the key is from a passphrase."""
        return EncryptionKey.of(self._object.for_save())

    def rotate(self, path: str, key: "EncryptionKey") -> None:
        """Makes the local files that a path leads to open with another key."""
        # Python handles signals between two waits for the lock of a file.
        while not self._object.rotate(path, key._object, 100):
            pass


@methods_translate_errors
class Memory:
    """Functions of the memory of tensors. `name` names the tensor in errors."""

    @staticmethod
    def check(name: str, tensor: Tensor) -> None:
        """Raises an error unless the tensor can be saved."""
        torch.classes.fst.Memory.check(name, tensor)

    @staticmethod
    def is_mapped(tensor: Tensor) -> bool:
        """Returns whether a tensor is a view of a file that fst has mapped."""
        return torch.classes.fst.Memory.is_mapped(tensor)

    @staticmethod
    def copy(name: str, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy on the same device.

        Reads views of mapped files with system calls: a file that has become shorter is an OSError.
        """
        return torch.classes.fst.Memory.copy(name, tensor)


@methods_translate_errors
class Checkpoint(CoreObject, Loads):
    """Open files whose headers have been read. Threads may share one.

    Args:
        paths: Files, directories or index files.
        headers: The result of `headers()` in another process that opened the same files. No header is read then.
        verify: Digests that loads compare, as `verify_of` returns them.
        key: The key of encrypted files. All files are encrypted then.
        accepts_plain: Whether files are accepted that are not encrypted, or have a registered key, although there is a
            key.
        opened: The object of the core, if it was opened with these arguments before.
    """

    def __init__(
        self,
        paths: Sequence[str],
        headers: Tensor | None = None,
        verify: str = "",
        key: EncryptionKey | None = None,
        accepts_plain: bool = False,
        opened: Any = None,
    ) -> None:
        self._verify = verify
        if opened is None:
            super().__init__("Checkpoint", paths, headers, verify, key, accepts_plain)
        else:
            self._object = opened
        # Methods of the object by name. PyTorch takes 1 us to look one up.
        self._methods: dict[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}

    def verify(self, part: int = 0, parts: int = 1, skips_groups: bool = False) -> None:
        """Reads one of several equal parts of the data and compares the digests. Later loads compare none.

        With `skips_groups`, files with digests of groups are left to the loads, which compare what they read.
        """
        self.call("verify", [part, parts, skips_groups])

    def verify_whole_files(self) -> None:
        """Reads files that have one digest of all their bytes, and compares it. Later loads of these compare none."""
        self.call("verify_whole_files")

    def headers(self) -> Tensor:
        """Returns all headers as bytes, for other processes that open the same files."""
        return self._object.headers()

    def is_encrypted(self) -> bool:
        """Returns whether a file is encrypted."""
        return self.call("is_encrypted")

    def names(self) -> list[str]:
        """Lists the names of all tensors, in the order of the files and of the bytes in each."""
        return self._object.names()

    def distinct_shapes(self) -> tuple[list[torch.Size], list[int]]:
        """Returns the distinct shapes of the tensors as loads return them, and for each name the index of its shape.

        Much faster than a shape for each tensor.
        """
        shapes, indices = self.call("shapes")
        return [torch.Size(shape) for shape in shapes], indices

    def metadata_of_file(self) -> dict[str, str]:
        """Returns the metadata of the only file. Raises IsADirectoryError if there are several."""
        return self.call("metadata")

    def index_metadata(self) -> dict[str, str]:
        """Returns the metadata of the index that the first path leads to. Empty if it leads to no index."""
        return self.call("index_metadata")

    def metadata(self) -> list[tuple[str, dict[str, str]]]:
        """Returns the path and the metadata of each file that has metadata."""
        return self._object.texts()

    def tensor_info(self, name: str) -> TensorInfo:
        """Returns the header entry of a tensor."""
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = TensorInfo(*self._method("entry")(name))
        return info

    def module_indices(self, names: Sequence[str]) -> list[int]:
        """Reads the index of the module of each tensor in tensorizer's format. Raises ValueError for other files."""
        return self.call("module_indices", list(names))

    def differing_hashes(self, names: Sequence[str], tensors: Sequence[Tensor]) -> list[tuple[str, str]]:
        """Compares tensors with the hashes in files of tensorizer's format.

        Args:
            names: The names of the tensors.
            tensors: Contiguous tensors on the CPU, with the stored dtypes.

        Returns:
            The names of tensors that differ, each with the algorithm of the hash.
        """
        return self._object.differing_hashes(names, tensors)

    def path(self, name: str) -> str:
        """Returns the path of the file that holds a tensor."""
        return self.call("path", name)

    def page_cache(self) -> str:
        """Returns a name for the page cache that serves loads of these files to the CPU.

        The name is equal in all processes that map the same files on one machine. It is empty if the files are not
        mapped.
        """
        return self.call("page_cache")

    def copy_name(self) -> str:
        """Returns a name for the copy of the checkpoint that this process reads.

        Two processes have the same name only if they read the same bytes: of the same files through one kernel, or of
        the same versions of objects. The name is empty if that cannot be told.
        """
        return self.call("copy_name")

    def load_files(self, device: Device, dtype: Dtype = None) -> dict[str, Tensor]:
        names = self.names()
        return dict(zip(names, self.load_tensors(names, device, dtype), strict=True))

    def overwrite(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        self._run("load_into", names, out, False)

    def load_region(
        self, name: str, region: Sequence[IndexRange] | None, device: Device, is_mapped: bool = True
    ) -> Tensor:
        """Loads one tensor, or an index region of it.

        Small ones on the CPU are copied. Others may be views of a mapped file, unless `is_mapped` is False: if the file
        becomes shorter, an access to such a view ends the process, and a read raises an OSError.
        """
        ranges = [number for index_range in region for number in index_range] if region else []
        # PyTorch takes 0.5 us for each argument.
        if is_mapped and device == _CPU:
            return self._run("load_region", name, ranges) if ranges else self._run("load_region", name)
        return self._run("load_region", name, ranges, device, is_mapped)

    def load_copies(self, names: Sequence[str], device: Device) -> list[Tensor]:
        """Loads named tensors into memory of their own: none is a view of a mapped file."""
        return self._run("load_tensors", names, device, is_mapped=False)

    def load_into(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """Overwrites existing tensors of the stored shapes, with the casts of `Tensor.copy_`."""
        self._run("load_into", names, out)

    def load_boxes_into(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], out: Sequence[Tensor]
    ) -> None:
        """Overwrites existing tensors of the regions' shapes, with the casts of `Tensor.copy_`."""
        self._run("load_boxes_into", names, *flatten(regions), out)

    def stream(
        self,
        names: Sequence[str] | None,
        regions: FlatRegions | None,
        device: Device,
        dtype: Dtype = None,
        window_bytes: int = UNBOUNDED,
        order: str = "ready",
    ) -> "Loader":
        """Loads tensors in the background, from the files that were opened.

        Args:
            names: The tensors to load, or None for all.
            regions: The index region of each, or None to load whole tensors.
            device: The device of the tensors.
            dtype: A floating-point dtype to cast to, or such dtypes by names and patterns.
            window_bytes: The upper bound for tensors that are loaded and not yet returned, in bytes.
            order: "file" for the order of the bytes in the files, or "ready" to return each tensor once it is ready.
        """
        options = {"window_bytes": window_bytes, "order": order, **dtype_arguments(dtype)}
        return Loader(self._run("stream", names, regions, device, **options))

    def _run(self, name: str, *arguments: Any, **options: Any) -> Any:
        loaded = self._method(name)(*arguments, **options)
        if self._verify and permits_unverified(self._verify):
            message = self.call("take_unverified")
            if message:
                warn(message)
        return loaded

    def _method(self, name: str) -> Any:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = getattr(self._object, name)
        return method


@methods_translate_errors
class Loader(CoreObject):
    """Tensors that load in the background, and are returned one by one.

    Args:
        loader: The result of `stream` of a `torch.classes.fst.Checkpoint`.
    """

    def __init__(self, loader: Any) -> None:
        self._object = loader
        # PyTorch takes 1 us to look a method up, and 2 us to call it.
        self._next_batch = loader.next_batch
        # Tensors that came in a batch with earlier ones.
        self._ready: deque[tuple[int, str, Tensor]] = deque()

    def next(self) -> tuple[int, str, Tensor] | None:
        """Returns the position, the name and the tensor that comes next, or None after the last.

        The position counts `names`, or all tensors of the files.
        """
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                # Also if other threads have taken what this one has added.
                pass
            batch = list(zip(*self._next_batch(), strict=True))
            if not batch:
                return None
            self._ready.extend(batch)

    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned."""
        self._object.close()
        self._ready.clear()

    def size(self) -> int:
        """Returns the number of all tensors."""
        return self._object.size()

    def total_bytes(self) -> int:
        """Returns the size of all tensors in bytes."""
        return self._object.total_bytes()


@methods_translate_errors
class Cipher(CoreObject):
    """Cipher of new files in tensorizer's format with a secret key, which the core overwrites in memory at the end.

    Args:
        key: 32 bytes.
        salt: The 16 bytes of salt of a key that was derived from a string, or nothing.
        opslimit: The number of passes of that derivation.
        memlimit: The memory of that derivation in bytes.
    """

    def __init__(self, key: bytes, salt: bytes = b"", opslimit: int = 0, memlimit: int = 0) -> None:
        with _secret(key) as secret:
            super().__init__("Cipher", secret, _uint8(salt), opslimit, memlimit)

    @staticmethod
    def derive(string: bytes, salt: bytes, opslimit: int, memlimit: int) -> bytes:
        """Derives a key from a string with Argon2id."""
        with _secret(string) as secret, _secret(bytes(KEY_BYTES)) as key:
            torch.classes.fst.Cipher.derive(secret, _uint8(salt), opslimit, memlimit, key)
            return key.numpy().tobytes()


@contextlib.contextmanager
def _secret(data: bytes) -> Iterator[Tensor]:
    """Copies bytes to a tensor, which is overwritten at the end."""
    tensor = _uint8(data)
    try:
        yield tensor
    finally:
        tensor.zero_()


def _uint8(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Writer(CoreObject):
    """Writes tensors to a file one by one.

    Args:
        path: The file or URL.
        metadata: Text for the header.
        tensorizer: Whether to write tensorizer's format, which has no metadata, with `write_hashed`.
        cipher: The cipher of an encrypted file in that format.
        key: The key of an encrypted file in either format.
    """

    def __init__(
        self,
        path: str,
        metadata: Mapping[str, str] | None = None,
        tensorizer: bool = False,
        cipher: Cipher | None = None,
        key: EncryptionKey | None = None,
    ) -> None:
        super().__init__("Writer", path, metadata, tensorizer, cipher, key)


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

    def load_own(self, rank: int, items: Sequence[int], device: torch.device, dtype: Dtype) -> list[Tensor]:
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


@methods_translate_errors
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

    def finish(self) -> None:
        """Flushes what the rank has written to the disk, and closes the files."""
        self.sent_parts = json.loads(self._object.finish())
