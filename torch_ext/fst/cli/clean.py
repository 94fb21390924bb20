"""`fst clean`: removes temporary files of saves that were killed."""

import argparse
import json

from fst._core.urls import is_remote, without_secrets
from fst._profile.formatting import format_count, format_size, visible


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
    from fst._core.arguments import path_of
    from fst._core.ops import call

    if remote := [directory for directory in arguments.directories if is_remote(directory)]:
        arguments.error(
            f"{without_secrets(remote[0])}: give local directories; a save to a URL has no temporary files, and aborts "
            "the uploads that it does not complete"
        )
    removed = [file for path in arguments.directories for file in call("remove_stale_files", path_of(path))]
    if arguments.json:
        print(json.dumps({"removed": removed}, indent=2))
        return 0
    for file in removed:
        print(visible(f"removed {file['path']}, {format_size(file['bytes'])}"))
    size = sum(file["bytes"] for file in removed)
    print(f"{format_count(len(removed), 'file')} removed, {format_size(size)}")
    return 0
