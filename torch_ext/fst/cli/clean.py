"""`fst clean`: removes temporary files of saves that were killed. Needs neither PyTorch nor the library."""

import argparse
import json
from pathlib import Path

from fst._core.formatting import format_count, format_size, visible
from fst._core.urls import is_remote, local_path_of, without_secrets
from fst._save.leftovers import remove_leftovers


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "clean",
        help="remove temporary files of saves that were killed",
        description="Removes the temporary files that killed saves have left in directories. Files of running saves, "
        "which hold locks on them, and the files of checkpoints stay.",
    )
    parser.add_argument("directories", nargs="+", metavar="DIRECTORY")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    if remote := [directory for directory in arguments.directories if is_remote(directory)]:
        arguments.error(
            f"{without_secrets(remote[0])}: give local directories; a save to a URL has no temporary files, and aborts "
            "the uploads that it does not complete"
        )
    directories = map(Path, map(local_path_of, arguments.directories))
    removed = [leftover for directory in directories for leftover in remove_leftovers(directory)]
    if arguments.json:
        files = [{"path": str(leftover.path), "bytes": leftover.bytes} for leftover in removed]
        print(json.dumps({"removed": files}, indent=2))
        return 0
    for leftover in removed:
        print(visible(f"removed {leftover.path}, {format_size(leftover.bytes)}"))
    size = sum(leftover.bytes for leftover in removed)
    print(f"{format_count(len(removed), 'file')} removed, {format_size(size)}")
    return 0
