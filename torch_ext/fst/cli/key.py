"""`fst key`: makes keys of encrypted files, and replaces them."""

from __future__ import annotations

import argparse
import errno
import json
import os
import secrets

from fst._profile.formatting import visible
from fst.cli.arguments import check_output, expanded


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "key",
        help="make and replace keys of encrypted files",
        description="Makes keys of encrypted safetensors files, and replaces them. All commands decrypt files with the "
        "key in the file that FST_ENCRYPTION_KEY_FILE names, or the passphrase in the file that "
        "FST_ENCRYPTION_PASSPHRASE_FILE names; fst convert --encrypt encrypts.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("new", help="write a new random key to a file, which only you can read")
    new.add_argument("file", type=expanded)
    new.set_defaults(run=_new)
    rotate = actions.add_parser(
        "rotate",
        help="make files open with another key",
        description="Makes the files of a checkpoint open with another key, without encrypting their data again. "
        "Whoever has the old key and an old copy of a file can still decrypt it.",
    )
    rotate.add_argument("path", type=expanded, metavar="PATH")
    rotate.add_argument("old", type=expanded, metavar="OLD", help="file with the old key")
    rotate.add_argument("new", type=expanded, metavar="NEW", help="file with the new key")
    rotate.set_defaults(run=_rotate)
    for action in (new, rotate):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _new(arguments: argparse.Namespace) -> int:
    check_output(arguments.file)
    try:
        descriptor = os.open(arguments.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError as error:
        message = f"{arguments.file}: exists, and may be the key of files, so it is not overwritten; give another path"
        raise FileExistsError(errno.EEXIST, message) from error
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        os.unlink(arguments.file)
        raise OSError(error.errno, f"{arguments.file}: the key was not written: {error.strerror}") from error
    _report(arguments, arguments.file, "new key; keep a copy in a safe place: without it, nobody can read the files")
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    from fst._core.encryption_key import EncryptionKey
    from fst._save.rotate import rotate_key

    rotate_key(arguments.path, EncryptionKey.from_file(arguments.old), EncryptionKey.from_file(arguments.new))
    _report(arguments, arguments.path, "opens with the new key")
    return 0


def _report(arguments: argparse.Namespace, path: str, message: str) -> None:
    if arguments.json:
        print(json.dumps({"path": path, "message": message}, indent=2))
    else:
        print(f"{visible(path)}: {message}")
