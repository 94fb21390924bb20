"""Loads of checkpoints and of named tensors.

A path is a safetensors file, a directory that contains one checkpoint, or the index file `*.safetensors.index.json` of
a sharded checkpoint. The checkpoint of a directory is its index, `model.safetensors`, or shards that are all there;
further files are one checkpoint if their names differ in numbers only. Functions that accept several paths load one
checkpoint from all of them. A tensor name may occur in only one file.

Every returned tensor owns its storage and is ready on the current stream. On the CPU, tensors of local files are views
of private mappings: they use memory once they are accessed, and writing to one changes neither the file nor any other
tensor. Files on network and FUSE file systems are read instead.

The examples use a file `model.safetensors` with the F32 tensors `weight` of shape [4, 3] and `bias` of shape [4].
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.options import LoadOptions, Reading, ReadOptions, reading_of, with_options
from fst._core import ops
from fst._core.arguments import (
    CastDtype,
    Device,
    Dtype,
    Path,
    Paths,
    check_kind,
    device_of,
    dtype_of,
    list_of,
    names_of,
    path_of,
    paths_of,
)
from fst._core.encryption_key import EncryptionKey
from fst._core.loads import Loads, OperatorLoads
from fst._core.verify import permits_unverified
from fst._load.progress import CheckpointWithBar
from fst._recipe.recipe import Recipe
from fst._signatures.request import Manifest, VerifyRequest, verify_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load_file(
    path: Path,
    device: Device = "cpu",
    *,
    dtype: Dtype = None,
    progress: bool = False,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
    recipe: Recipe | Sequence[str] | None = None,
    dequantize: bool = False,
) -> dict[str, Tensor]:
    """Loads every tensor of a checkpoint.

    On the CPU, tensors of local files are views of private mappings of the files. If another process truncates a mapped
    file, the next access to a missing page ends this process with SIGBUS. Replacing a file by a rename is safe, as
    `save_file` does it. If files are truncated or changed in place, set the environment variable `FST_READER=pread`,
    which reads files into memory instead of mapping them.

    Args:
        path: A file, a directory with one checkpoint, or an index file.
        device: The device of the tensors: "cpu", "cuda" (the current GPU), "cuda:1", a `torch.device`, the index of a
            GPU, or `None` for PyTorch's default device. "meta" reads only the headers.
        dtype: A floating-point dtype, or its name, such as "bf16". Tensors stored as F16, BF16, F32 or F64 are cast to
            it. All others keep their dtype: integers, bools, complex numbers and the 8-bit and 4-bit floats. A mapping
            of names and patterns (`*`, `?`, `[...]`) to dtypes casts only tensors that match one, so that the scales of
            quantized weights keep their dtype: `{"*_scale": None, "*": torch.bfloat16}`. `None` keeps the stored dtype.
            A name takes precedence over patterns, and a pattern over later patterns.
        progress: Shows a progress bar of bytes, which requires tqdm. Compiled and exported programs show none. Mapped
            files need no reading, so their load to the CPU completes at once.
        verify: Compares the data with digests, and returns no tensor if they differ. `True` takes the digests that the
            files carry, which `save_file(..., digests="blake3")` wrote, or that the Hugging Face Hub states of them. A
            mapping such as `{"model.safetensors": "sha256:..."}`, or the path of a file with such a JSON object or with
            lines of `sha256sum`, has the digests of whole files, and so has a `fst.Signature`; they do not go with
            `progress`. A load that the digests do not cover is an IntegrityError, unless `fst.Verify` allows it: a
            slice of a tensor with SHA-256, or some tensors of a file with one digest. See docs/integrity.md.
        encryption_key: The key of encrypted files. Every byte is authenticated. A file that is not encrypted is an
            `IntegrityError`. See docs/encryption.md.
        recipe: A `fst.Recipe`, or a list of its rules: the load returns the outputs of the rules, each written once,
            in place of the stored tensors. `dtype`, names and slices refer to the outputs. See docs/converting.md.
        dequantize: Whether quantized tensors become numbers, and their scales are left out. The rules follow from the
            headers and from a local `config.json`, as `fst.Recipe.dequantizing` returns them.

    Returns:
        The tensors by name, in the order of their bytes in the file. The shapes are those in the file, except that
        PyTorch stores two F4 numbers in one element, which halves the last dimension.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError, OSError: The operating system reported an error. A
            directory without safetensors files raises IsADirectoryError.
        SafetensorError: A file is malformed or truncated, or two files contain the same tensor name.
        IntegrityError: A digest differs, a file to verify has none or is missing, the digests do not cover the load, or
            a signature is not valid.
        NotImplementedError: PyTorch has no dtype for one of the tensors (F6_E2M3, F6_E3M2). The other tensors can be
            loaded by name.
        ValueError: The device does not exist, `dtype` is not a floating-point dtype, or a pattern in it, other than
            `"*"`, decides for no tensor of the checkpoint. Or a rule of the recipe does not fit the checkpoint, with
            its number and column, or a tensor to dequantize lacks a scale. No data was read.
        ImportError: `progress` is True and tqdm is not installed.
        torch.OutOfMemoryError: The device has no memory for the tensors.
        KeyboardInterrupt: Ctrl-C was pressed. Everything loaded so far has been freed.

    Example:
        >>> weights = fst.load_file("model.safetensors", dtype=torch.bfloat16)
        >>> weights["weight"].shape, weights["weight"].dtype
        (torch.Size([4, 3]), torch.bfloat16)
    """
    loads, target = _loads(
        path_of(path),
        device,
        dtype=dtype,
        progress=progress,
        verify=verify,
        encryption_key=encryption_key,
        recipe=recipe,
        dequantize=dequantize,
    )
    return loads.load_files(*target)


@with_options(LoadOptions)
def load_files(paths: Paths, device: Device = "cpu", **options: "Unpack[LoadOptions]") -> dict[str, Tensor]:
    """Loads every tensor of several files into one dictionary.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        device, dtype, progress, verify, encryption_key, recipe, dequantize: As in `load_file`.

    Returns:
        The tensors by name, in the order of the files and of the bytes in each.

    Raises:
        The errors of `load_file`.

    Example:
        >>> sorted(fst.load_files(["model.safetensors"]))
        ['bias', 'weight']
    """
    loads, target = _loads(paths, device, **options)
    return loads.load_files(*target)


@with_options(LoadOptions)
def load_tensors(
    paths: Paths,
    names: Sequence[str],
    device: Device = "cpu",
    **options: "Unpack[LoadOptions]",
) -> list[Tensor]:
    """Loads named tensors. Reads only their bytes and the headers.

    If the paths are str, the function works in `torch.compile(fullgraph=True)`, `torch.export` and AOTInductor, which
    cannot lower the dict of `load_file`. They read shapes and dtypes from the headers during compilation. Compile a
    program again if its files are replaced by files with other shapes or dtypes.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to load. A name that occurs twice gives two separate tensors.
        device, dtype, progress, verify, encryption_key, recipe, dequantize: As in `load_file`.

    Returns:
        One tensor for each name, in the same order.

    Raises:
        KeyError: No file contains the name. The message lists the nearest names.
        And the errors of `load_file`.

    Example:
        >>> bias, weight = fst.load_tensors("model.safetensors", ["bias", "weight"])
        >>> bias.shape, weight.shape
        (torch.Size([4]), torch.Size([4, 3]))
    """
    loads, target = _loads(paths, device, **options)
    return loads.load_tensors(names_of(names), *target)


@with_options(LoadOptions)
def load_slices(
    paths: Paths,
    names: Sequence[str],
    dims: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: Device = "cpu",
    **options: "Unpack[LoadOptions]",
) -> list[Tensor]:
    """Loads a slice along one dimension of each named tensor. Reads only the bytes of the slices.

    Each result equals `tensor.narrow(dim, start, length)` and is contiguous. The function can be compiled and exported
    like `load_tensors`.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to slice.
        dims: The dimension of each slice. A negative dimension counts from the last.
        starts: The first index of each slice, from 0 to the size of the dimension in the PyTorch tensor.
        lengths: The number of indices of each slice. `start + length` is at most the size of the dimension.
        device, dtype, progress, verify, recipe, dequantize: As in `load_file`.
        encryption_key: As in `load_boxes`.

    Returns:
        One tensor for each name, in the same order.

    Raises:
        KeyError: No file contains the name. The message lists the nearest names.
        ValueError: A slice exceeds its tensor, or the lists differ in length.
        And the errors of `load_file`.

    Example:
        >>> rows, columns = fst.load_slices(
        ...     "model.safetensors", ["weight", "weight"], dims=[0, -1], starts=[2, 0], lengths=[2, 1]
        ... )
        >>> rows.shape, columns.shape
        (torch.Size([2, 3]), torch.Size([4, 1]))
    """
    loads, target = _loads(paths, device, **options)
    slices = list_of(dims, int, "dims"), list_of(starts, int, "starts"), list_of(lengths, int, "lengths")
    return loads.load_slices(names_of(names), slices, *target)


@with_options(LoadOptions)
def load_boxes(
    paths: Paths,
    names: Sequence[str],
    boxes: Sequence[Sequence[tuple[int, int, int]]],
    device: Device = "cpu",
    **options: "Unpack[LoadOptions]",
) -> list[Tensor]:
    """Loads an index region of each named tensor. Reads only the bytes of the regions.

    An index region selects `length` indices of each dimension: `start`, `start + step`, and so on. The function can be
    compiled and exported like `load_tensors`. `safe_open` offers the usual indexing of tensors.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to load regions of.
        boxes: The region for each name: `(start, length, step)` for each dimension of the PyTorch tensor. Starts and
            lengths are not negative, steps are at least 1, and all indices are inside the dimension.
        device, dtype, progress, verify, recipe, dequantize: As in `load_file`.
        encryption_key: As in `load_file`. Only the chunks that the regions touch are decrypted.

    Returns:
        One contiguous tensor for each name, in the same order. The lengths are its shape.

    Raises:
        KeyError: No file contains the name. The message lists the nearest names.
        ValueError: A region exceeds its tensor, or the lists differ in length.
        And the errors of `load_file`.

    Example:
        >>> [corners] = fst.load_boxes("model.safetensors", ["weight"], [[(0, 2, 3), (0, 2, 2)]])
        >>> corners.shape
        torch.Size([2, 2])
    """
    loads, target = _loads(paths, device, **options)
    if len(boxes) != len(names):
        raise ValueError(f"{len(names)} names, but {len(boxes)} boxes; give one for every name")
    return loads.load_boxes(names_of(names), boxes, *target)


@with_options(ReadOptions)
def load_into(
    paths: Paths,
    names: Sequence[str],
    out: Sequence[Tensor],
    **options: "Unpack[ReadOptions]",
) -> None:
    """Overwrites existing tensors in place. Their addresses do not change.

    All names, shapes and dtypes are checked before anything is written. The function can be compiled and exported, even
    without access to the checkpoint. It has no progress bar, because loads with a bar allocate new tensors.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        names: The tensors to load.
        out: For each name, a tensor of the stored shape and dtype, on the CPU or a GPU. It may be non-contiguous, a
            view, or a parameter. Autograd does not record the load.
        verify: As in `load_file`. The data are read and compared before anything is written, and then read again.
        encryption_key: As in `load_file`. Without `verify`, data is decrypted in place: after an IntegrityError, the
            tensors hold old values, new ones, zeros or encrypted bytes.
        recipe, dequantize: As in `load_file`, with the names of outputs in `names`.

    Raises:
        KeyError: No file contains the name. The message lists the nearest names.
        ValueError: A shape or dtype differs from the stored one, or the lists differ in length. Nothing has been
            written.
        And the errors of `load_file`.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> address = linear.weight.data_ptr()
        >>> fst.load_into("model.safetensors", ["weight", "bias"], [linear.weight, linear.bias])
        >>> linear.weight.data_ptr() == address
        True
    """
    reading = reading_of(**options)
    names, outputs = names_of(names), list_of(out, Tensor, "out")
    for name, output in zip(names, outputs, strict=False):
        check_kind(name, output)
    _open(paths, reading).overwrite(names, outputs)


def verify(paths: Paths, manifest: Manifest | None = None, *, encryption_key: EncryptionKey | None = None) -> None:
    """Reads all data of a checkpoint, and compares their digests, or the authentication codes of encrypted files.

    Returns no tensors. Loads compare digests themselves with `verify`, without reading the data twice.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        manifest: Digests of whole files, as `verify` of `load_file` takes them. `None` takes the digests that the files
            carry. A manifest or signature alone needs no key of encrypted files: it has digests of the encrypted bytes.
        encryption_key: As in `load_file`.

    Raises:
        IntegrityError: A digest or a code differs, or a file has none.
        And the errors of `load_file`.

    Example:
        >>> fst.save_file({"weight": torch.ones(4, 3)}, "verified.safetensors", digests="blake3")
        >>> fst.verify("verified.safetensors")
    """
    request = verify_of(True if manifest is None else manifest)
    if encryption_key is not None:
        OpenCheckpoint(paths, verify=request, encryption_key=encryption_key).verify()
        return
    ops.verify(paths_of(paths), request)


def tensor_names(paths: Paths, *, encryption_key: EncryptionKey | None = None) -> list[str]:
    """Lists the names of all tensors, in the order of the files and of the bytes in each. Reads only the headers.

    Of an index in a remote store, only the index is read, and the names are in its order: by file, and in alphabetical
    order in each.

    Args:
        paths: A path or a list of paths, each as in `load_file`.
        encryption_key: As in `load_file`. Names are not encrypted, but they are authenticated with the key, except in
            `.tensors` files.

    Raises:
        The errors of `load_file` that concern paths, headers and keys.

    Example:
        >>> fst.tensor_names("model.safetensors")
        ['bias', 'weight']
    """
    return OpenCheckpoint(paths, encryption_key=encryption_key).listed_names()


def metadata(path: Path, *, encryption_key: EncryptionKey | None = None) -> dict[str, str]:
    """Reads the metadata that the writer of a file stored in its header.

    Args:
        path: A file, or a directory or index file of a checkpoint in one file.
        encryption_key: As in `tensor_names`.

    Raises:
        IsADirectoryError: The checkpoint has several files, each with its own metadata.
        And the errors of `load_file` that concern paths, headers and keys.

    Example:
        >>> fst.metadata("model.safetensors")
        {'format': 'pt'}
    """
    return OpenCheckpoint(path_of(path), encryption_key=encryption_key).metadata_of_file()


def _loads(
    paths: Paths, device: Device, *, dtype: Dtype = None, progress: bool = False, **options: "Unpack[ReadOptions]"
) -> tuple[Loads, tuple[torch.device | str, CastDtype]]:
    """Returns an object with the loads of a checkpoint, and the device and the dtype for them.

    Compiled programs show no bar.
    """
    target = device_of(device), dtype_of(dtype)
    reading = reading_of(**options)
    if progress and not torch.compiler.is_compiling():
        return CheckpointWithBar(paths, None, *reading), target
    return _open(paths, reading), target


def _open(paths: Paths, reading: Reading) -> Loads:
    """Returns an object with the loads of a checkpoint.

    Operators cost less per call than methods, and compilers can trace them. They take no keys, since graphs would
    contain them, and do not say which tensors they have not verified.
    """
    is_traced = torch.compiler.is_compiling()
    is_operator = reading.is_stored and not permits_unverified(reading.verify)
    if reading.encryption_key is None and (is_traced or is_operator):
        if reading.rules is None:
            raise ValueError("compiled programs have no dequantize; pass recipe=fst.Recipe.dequantizing(paths)")
        return OperatorLoads(paths_of(paths), reading.verify, reading.rules)
    return OpenCheckpoint(paths, None, *reading)
