"""Open checkpoints of the core, and loaders of their tensors."""
# Methods of the wrapped objects have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst._core.arguments import CastDtype, dtype_arguments
from fst._core.core_object import CoreObject
from fst._core.errors import methods_translate_errors, translates_errors
from fst._core.index_range import FlatRegions, IndexRange, flatten
from fst._core.loads import Loads
from fst._core.secret_key import EncryptionKey
from fst._core.urls import is_remote
from fst._core.verify import permits_unverified, warn

Device = torch.device | str

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


class RecipeOutput(NamedTuple):
    """Output of the rules of a recipe.

    Attributes:
        name: The name.
        dtype: The dtype's name in a header: "F32", "BF16", ...
        shape: The shape as loads return it.
        sources: The names of the tensors that the output is made of.
    """

    name: str
    dtype: str
    shape: list[int]
    sources: list[str]


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
        # The core opens the files of an index in a store when they are needed.
        self._is_lazy = opened is None and len(paths) == 1 and is_remote(paths[0])
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

    def share_disk(self) -> None:
        """Makes later loads leave out more of the bytes between those that they need: other processes read these."""
        self.call("share_disk")

    def headers(self) -> Tensor:
        """Returns all headers as bytes, for other processes that open the same files."""
        return self._object.headers()

    def is_encrypted(self) -> bool:
        """Returns whether a file is encrypted."""
        return self.call("is_encrypted")

    def names(self) -> list[str]:
        """Lists the names of all tensors, in the order of the files and of the bytes in each."""
        if self._is_lazy:
            self.call("open_files")
            self._is_lazy = False
        return self._object.names()

    def listed_names(self) -> list[str]:
        """Lists the names of all tensors, in the order of an index in a store if its files are not all open."""
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
        return [(path, texts) for path, texts in self.call("texts")]

    def tensor_info(self, name: str) -> TensorInfo:
        """Returns the header entry of a tensor."""
        info = self._infos.get(name)
        if info is None:
            info = self._infos[name] = TensorInfo(*self._method("entry")(name))
        return info

    def module_indices(self, names: Sequence[str]) -> list[int]:
        """Reads the index of the module of each tensor in tensorizer's format. Raises ValueError for other files."""
        return self.call("module_indices", list(names))

    def path(self, name: str) -> str:
        """Returns the path of the file that holds a tensor."""
        return self.call("path", name)

    def text_beside(self, name: str) -> tuple[str, str] | None:
        """Reads a small file with this name beside the files or objects. Returns its path and its text, or `None`."""
        found = self.call("text_beside", name)
        return None if found is None else (found[0], found[1])

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

    def load_files(self, device: Device, dtype: CastDtype = None) -> dict[str, Tensor]:
        names = self.names()
        return dict(zip(names, self.load_tensors(names, device, dtype), strict=True))

    def load_tensors(self, names: Sequence[str], device: Device, dtype: CastDtype = None) -> list[Tensor]:
        return self._run("load", names, None, device, **dtype_arguments(dtype))

    def load_slices(
        self, names: Sequence[str], slices: Sequence[Sequence[int]], device: Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        dims, starts, lengths = slices
        return self._run("load", names, (starts, lengths, []), device, dims=dims, **dtype_arguments(dtype))

    def load_boxes(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], device: Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        return self._run("load", names, flatten(regions), device, **dtype_arguments(dtype))

    def overwrite(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        self._run("load_into", names, out, None, False)

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
        return self._run("load", names, None, device, is_mapped=False)

    def load_into(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """Overwrites existing tensors of the stored shapes, with the casts of `Tensor.copy_`."""
        self._run("load_into", names, out)

    def load_boxes_into(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], out: Sequence[Tensor]
    ) -> None:
        """Overwrites existing tensors of the regions' shapes, with the casts of `Tensor.copy_`."""
        self._run("load_into", names, out, flatten(regions))

    def recipe(self, rules: Sequence[str], strict: bool = False) -> tuple[list[RecipeOutput], list[str]]:
        """Returns the outputs of rules, and the names of the tensors that no rule reads. Reads no data.

        With `strict`, such tensors are an error.
        """
        described = self.call("recipe", {"rules": list(rules), "strict": strict})
        return [RecipeOutput(*output) for output in described["outputs"]], described["unused"]

    def load_recipe(
        self,
        names: Sequence[str],
        rules: Sequence[str],
        device: Device,
        dtype: CastDtype = None,
        regions: Sequence[Sequence[IndexRange]] | None = None,
        is_mapped: bool = True,
    ) -> list[Tensor]:
        """Loads named outputs of rules, or an index region of each."""
        options = {"is_mapped": is_mapped, "rules": rules, **dtype_arguments(dtype)}
        return self._run("load", names, None if regions is None else flatten(regions), device, **options)

    def load_recipe_into(
        self,
        names: Sequence[str],
        rules: Sequence[str],
        out: Sequence[Tensor],
        regions: Sequence[Sequence[IndexRange]] | None = None,
    ) -> None:
        """Overwrites existing tensors with outputs of rules or regions of them, with the casts of `Tensor.copy_`."""
        self._run("load_into", names, out, None if regions is None else flatten(regions), rules=rules)

    def stream(
        self,
        names: Sequence[str] | None,
        regions: FlatRegions | None,
        device: Device,
        dtype: CastDtype = None,
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
        self.warn_of_unverified()
        return loaded

    def warn_of_unverified(self) -> None:
        """Warns of the tensors that loads have not verified since the last call, which a request may permit."""
        if self._verify and permits_unverified(self._verify):
            message = self.call("take_unverified")
            if message:
                warn(message)

    def _method(self, name: str) -> Any:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = getattr(self._object, name)
        return method


@translates_errors
def load_views_into(
    checkpoints: Sequence[Checkpoint], views: Any, held: Sequence[Tensor], out: Sequence[Tensor]
) -> None:
    """Fills tensors with recorded views, with the casts of `Tensor.copy_`.

    Args:
        checkpoints: The checkpoints whose tensors the views show.
        views: The views, as rust/recipe/recorded.rs has them. Positions count the tensors of all checkpoints.
        held: The tensors in memory that the views show.
        out: The tensors to fill, which share no elements.
    """
    cores = [checkpoint._object for checkpoint in checkpoints]
    torch.classes.fst.Checkpoint.load_views_into(cores, json.dumps(views, separators=(",", ":")), list(held), list(out))
    for checkpoint in checkpoints:
        checkpoint.warn_of_unverified()


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
