"""`fst delta`: makes, shows and applies the changes from one version of a checkpoint to the next."""

from __future__ import annotations

import argparse
import errno
import json
import os
from typing import TYPE_CHECKING, Any

from fst._core.urls import is_url
from fst._profile.formatting import format_count, format_size, visible
from fst.cli.arguments import Paths, expanded, size
from fst.cli.table import table

if TYPE_CHECKING:
    from fst._core.checkpoint import Checkpoint
    from fst._core.encryption_key import EncryptionKey
    from fst._signatures.request import VerifyRequest

_INDEX = "model.safetensors.index.json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "delta",
        help="make, show and apply the changes from one version of a checkpoint to the next",
        description="A delta is a directory with the changes from one version of a checkpoint to the next, in the "
        "format of slime, miles and SGLang.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="write the changes from one checkpoint to another")
    make.add_argument("old", type=expanded, metavar="OLD", help="the base version")
    make.add_argument("new", type=expanded, metavar="NEW", help="the new version")
    make.add_argument("directory", type=expanded, metavar="DIRECTORY", help="the delta to write")
    make.add_argument(
        "--version",
        dest="new_version",
        required=True,
        metavar="VERSION",
        help='identifier of the new version, usually six digits: "000001"',
    )
    make.add_argument("--base-version", required=True, metavar="VERSION", help="identifier of the base version")
    make.add_argument(
        "--encoding",
        choices=["xor", "overwrite"],
        default="xor",
        help="xor (default) is smaller; overwrite can be applied twice",
    )
    make.add_argument(
        "--checksum",
        choices=["xxh3-128", "blake3", "adler32"],
        default="xxh3-128",
        help="checksum of each new tensor; default xxh3-128",
    )
    make.set_defaults(run=_make)
    show = actions.add_parser("show", help="list versions, encodings and sizes of deltas; reads no changes")
    show.add_argument("deltas", nargs="+", action=Paths, metavar="DELTA")
    show.add_argument("--base", type=expanded, metavar="PATH", help="also print the sizes as shares of this checkpoint")
    show.set_defaults(run=_show)
    apply = actions.add_parser(
        "apply",
        help="write the checkpoint that results from deltas",
        description="Writes the checkpoint that results from a base version and deltas, the oldest first. Verifies the "
        "checksums of all tensors that change.",
    )
    apply.add_argument("base", type=expanded, metavar="BASE", help="the version that the first delta changes")
    apply.add_argument("deltas", nargs="+", action=Paths, metavar="DELTA")
    apply.add_argument("directory", type=expanded, metavar="DIRECTORY", help="the checkpoint to write")
    apply.set_defaults(run=_apply)
    for action in (make, apply):
        action.add_argument(
            "--max-shard-size",
            type=size,
            metavar="SIZE",
            help='upper bound for the data in a file, such as "5GB" or "512MiB"; default 5GB',
        )
        action.add_argument("--force", action="store_true", help="overwrite a checkpoint in the directory")
        action.add_argument(
            "--encrypt", type=expanded, metavar="KEY", help="encrypt what is written with the key in this file"
        )
        action.add_argument("--decrypt", action="store_true", help="write plain data, although an input is encrypted")
        action.add_argument("--verify", action="store_true", help="compare inputs with the digests that they carry")
        action.add_argument("--manifest", type=expanded, metavar="FILE", help="compare inputs with a manifest")
        action.add_argument("--signature", type=expanded, metavar="FILE", help="compare inputs with a signature")
        action.add_argument("--public-key", type=expanded, metavar="FILE", help="the public key of the signature")
        action.set_defaults(error=parser.error)
    for action in (make, show, apply):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _make(arguments: argparse.Namespace) -> int:
    from fst._save.check import DEFAULT_SHARD_BYTES
    from fst._update.delta_files import save_delta

    _check_directory(arguments)
    key = _key(arguments)
    save_delta(
        arguments.old,
        arguments.new,
        arguments.directory,
        version=arguments.new_version,
        base_version=arguments.base_version,
        encoding=arguments.encoding,
        checksum=arguments.checksum,
        max_shard_bytes=arguments.max_shard_size or DEFAULT_SHARD_BYTES,
        verify=_verify(arguments),
        encryption_key=key,
        decrypt=arguments.decrypt,
    )
    return _report(arguments, "changed", key)


def _show(arguments: argparse.Namespace) -> int:
    from fst._core.checkpoint import Checkpoint
    from fst._update.source import UpdateSource

    deltas: list[dict[str, Any]] = []
    for path in arguments.deltas:
        chain, frames = UpdateSource([path]), Checkpoint([path])
        [(encoding, checksum)] = chain.encodings()
        deltas.append(
            {
                "path": path,
                "base_version": chain.base_version(),
                "version": chain.version(),
                "encoding": encoding,
                "checksum": checksum,
                "tensors": len(chain.names()),
                "bytes": _bytes_of(frames),
            }
        )
    if arguments.base is not None:
        base_bytes = _bytes_of(Checkpoint([arguments.base]))
        for delta in deltas:
            delta["share"] = delta["bytes"] / max(base_bytes, 1)
    if arguments.json:
        print(json.dumps({"deltas": deltas}, indent=2))
        return 0
    rows = [["delta", "base version", "version", "encoding", "checksum", "tensors", "size"]]
    for delta in deltas:
        *texts, tensors, size_bytes = list(delta.values())[:7]
        share = f" ({delta['share']:.1%})" if "share" in delta else ""
        rows.append([*(text or "-" for text in texts), f"{tensors:,}", format_size(size_bytes) + share])
    print(table(rows, right=[5, 6], flexible=[0]))
    return 0


def _apply(arguments: argparse.Namespace) -> int:
    from fst._save.check import DEFAULT_SHARD_BYTES
    from fst._update.delta_files import apply_delta

    _check_directory(arguments)
    key = _key(arguments)
    apply_delta(
        arguments.base,
        arguments.deltas,
        arguments.directory,
        arguments.max_shard_size or DEFAULT_SHARD_BYTES,
        verify=_verify(arguments),
        encryption_key=key,
        decrypt=arguments.decrypt,
    )
    return _report(arguments, "written", key)


def _key(arguments: argparse.Namespace) -> EncryptionKey | None:
    from fst._core.encryption_key import EncryptionKey

    return None if arguments.encrypt is None else EncryptionKey.from_file(arguments.encrypt)


def _verify(arguments: argparse.Namespace) -> VerifyRequest:
    from fst._signatures.signature import Signature

    if sum([arguments.verify, arguments.manifest is not None, arguments.signature is not None]) > 1:
        arguments.error("--verify, --manifest and --signature exclude each other")
    if (arguments.signature is None) != (arguments.public_key is None):
        arguments.error("--signature and --public-key go together")
    if arguments.signature is not None:
        return Signature(arguments.signature, public_key=arguments.public_key)
    return arguments.verify if arguments.manifest is None else str(arguments.manifest)


def _check_directory(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    if not is_url(directory) and not arguments.force and os.path.exists(os.path.join(directory, _INDEX)):
        raise FileExistsError(
            errno.EEXIST, f"{directory}: has a checkpoint; give another directory, or overwrite it with --force"
        )


def _report(arguments: argparse.Namespace, done: str, key: EncryptionKey | None) -> int:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    written = OpenCheckpoint(arguments.directory, encryption_key=key)
    count, size_bytes = len(written.names()), _bytes_of(written)
    if arguments.json:
        print(json.dumps({"path": arguments.directory, "tensors": count, "bytes": size_bytes}, indent=2))
    else:
        print(f"{visible(arguments.directory)}: {format_count(count, 'tensor')} {done}, {format_size(size_bytes)}")
    return 0


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensor_info(name).nbytes for name in checkpoint.names())
