"""`fst verify`: checks a checkpoint completely."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from fst._core.files import safetensors_in
from fst._core.urls import without_secrets
from fst._profile.formatting import format_count, format_size, visible
from fst.cli.arguments import Paths, expanded
from fst.cli.message import message_of
from fst.cli.sign import add_rules, rules_of

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 16 << 20


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="check headers, names and index, and read every byte",
        description="Checks the header of each file, that no name is in two files, that an index agrees with its "
        "files, that every byte can be read, and that the data have the digests that the file carries, the "
        "authentication codes of an encrypted file, or the hashes in a file of tensorizer. With --manifest or "
        "--signature, compares whole files of any kind instead. The exit code is 0 if every check passes.",
    )
    parser.add_argument("paths", nargs="*", action=Paths, metavar="PATH")
    parser.add_argument(
        "--manifest",
        type=expanded,
        metavar="FILE",
        help="compare the digests of files: a JSON object of names and digests, or lines of sha256sum or b3sum --tag. "
        "PATH is the directory of the files, by default that of FILE",
    )
    parser.add_argument(
        "--signature",
        type=expanded,
        metavar="FILE",
        help="verify a signature of OpenSSF Model Signing, and compare all files with it. PATH is the directory of the "
        "model, or its only file, by default the directory of FILE",
    )
    parser.add_argument("--public-key", type=expanded, metavar="FILE", help="the signer's public key")
    parser.add_argument(
        "--certificate-chain",
        action="append",
        type=expanded,
        metavar="FILE",
        help="trusted root certificates, and others between them and the signer's; may be repeated; requires the "
        "package cryptography",
    )
    parser.add_argument("--identity", help="the signer of a keyless signature; requires the package sigstore")
    parser.add_argument("--issuer", help="the provider that has confirmed the identity")
    parser.add_argument("--trust-config", type=expanded, metavar="FILE", help="Sigstore's client trust configuration")
    add_rules(parser)
    parser.add_argument("--ignore-unsigned", action="store_true", help="accept files that the signature does not name")
    parser.add_argument("--digests", action="store_true", help="fail if a file carries no digests")
    parser.add_argument("--finite", action="store_true", help="also check that no tensor contains NaN or infinity")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    listed = arguments.signature or arguments.manifest
    if listed is None and not arguments.paths:
        arguments.error("nothing to verify; give a PATH, --manifest FILE, or --signature FILE")
    if arguments.manifest is not None and arguments.signature is not None:
        arguments.error("--manifest and --signature exclude each other")
    if arguments.signature and not (arguments.public_key or arguments.certificate_chain or arguments.identity):
        arguments.error("--signature needs the signer: --public-key, --certificate-chain, or --identity and --issuer")
    results: list[dict[str, object]] = []
    for path in arguments.paths or [os.path.dirname(listed) or "."]:
        checks = _checks(path, arguments) if listed is None else _file_checks(path, arguments)
        # Files and paths with a failed check. One fault is one verdict: the other checks of the file, or of
        # all files together, would say nothing new, or call its bytes good.
        wrong: set[str] = set()
        for name, check in checks:
            subject = name.partition(" of ")[2]
            if subject in wrong or (wrong and subject == without_secrets(path)):
                continue
            try:
                message, is_ok = check(), True
            except (OSError, ValueError, LookupError, NotImplementedError) as error:
                message, is_ok = message_of(error), False
                wrong.add(subject)
            results.append({"check": name, "ok": is_ok, "message": message})
            if not arguments.json:
                print(visible(f"{'ok     ' if is_ok else 'WRONG  '} {name}: {message}"), flush=True)
    failed = sum(not result["ok"] for result in results)
    if arguments.json:
        print(json.dumps({"ok": failed == 0, "checks": results}, indent=2))
    else:
        print("all is well" if failed == 0 else f"{format_count(failed, 'check')} failed")
    return int(failed > 0)


def _file_checks(path: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the check of all files of a manifest or signature."""

    from fst._core.arguments import path_of
    from fst._core.ops import call
    from fst._signatures.request import signature_of
    from fst._signatures.signature import Signature

    def compare() -> str:
        if arguments.signature is None:
            count = call("verify_files", [path_of(arguments.manifest), path_of(path)])
            return f"{format_count(count, 'file')} with the digests of {without_secrets(arguments.manifest)}"
        signature = Signature(
            arguments.signature,
            public_key=arguments.public_key,
            certificate_chain=arguments.certificate_chain or (),
            identity=arguments.identity,
            issuer=arguments.issuer,
            trust_config=arguments.trust_config,
        )
        rules = rules_of(arguments) | {"ignore_unsigned": arguments.ignore_unsigned}
        count = call("verify_model", [signature_of(signature), rules, path_of(path)])
        return f"{format_count(count, 'file')} as signed in {without_secrets(arguments.signature)}"

    yield f"files of {without_secrets(path)}", compare


def _checks(path: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name and the function of each check, cheapest first. A function describes its result, or raises."""
    files = files_of(path)
    for file in files:
        yield f"header of {without_secrets(file)}", partial(_header, file)
    if files != [path]:
        yield f"names of {without_secrets(path)}", partial(_names, path)
    checks: dict[str, Callable[[str], str]] = {
        "codes": _codes,
        "hashes": partial(_digests, result="as when they were written"),
        "digests": partial(_digests, result="and the header verified"),
        "bytes": _read,
    }
    for file in files:
        protection = _protection(file) or ("digests" if arguments.digests else "bytes")
        yield f"{protection} of {without_secrets(file)}", partial(checks[protection], file)
    if arguments.finite:
        yield f"values of {without_secrets(path)}", partial(_finite, path)


def files_of(path: str) -> list[str]:
    """Returns the files of a checkpoint. Each is checked separately, so that all failures are reported."""
    from fst._core.arguments import path_of
    from fst._core.ops import call

    # Opening an invalid index, or an incomplete set of shards, reports its error again.
    with contextlib.suppress(OSError, ValueError):
        listed: list[str] = call("checkpoint_files", [path_of(path)])
        return listed
    names = safetensors_in(path) if os.path.isdir(path) else []
    return [os.path.join(path, name) for name in names] or [path]


def _names(path: str) -> str:
    from fst._core.arguments import path_of
    from fst._core.ops import call

    call("check_index", [path_of(path)])
    return _header(path)


def _header(path: str) -> str:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    checkpoint = OpenCheckpoint(path)
    names = checkpoint.names()
    size = format_size(sum(checkpoint.tensor_info(name).nbytes for name in names))
    return f"{format_count(len(names), 'tensor')}, {size}"


def _protection(path: str) -> Literal["codes", "hashes", "digests"] | None:
    """Returns what a file has to compare its data with: authentication codes, if it is encrypted, hashes or digests."""
    from fst._checkpoint.checkpoint import OpenCheckpoint
    from fst._core.arguments import DIGESTS_KEY

    # An invalid header is reported by its own check.
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        checkpoint = OpenCheckpoint(path)
        if checkpoint.is_encrypted():
            return "codes"
        if any(checkpoint.tensor_info(name).kind >= 0 for name in checkpoint.names()[:1]):
            return "hashes"
        if any(DIGESTS_KEY in metadata for _, metadata in checkpoint.metadata()):
            return "digests"
    return None


def _codes(path: str) -> str:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    checkpoint = OpenCheckpoint(path)
    checkpoint.verify()
    names = checkpoint.names()
    # tensorizer's format has no code of its headers.
    has_code = all(checkpoint.tensor_info(name).kind < 0 for name in names)
    return f"{format_count(len(names), 'tensor')}{' and the header' if has_code else ''} authenticated"


def _digests(path: str, result: str) -> str:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    checkpoint = OpenCheckpoint(path, verify="digests")
    checkpoint.verify()
    return f"{format_count(len(checkpoint.names()), 'tensor')} {result}"


def _read(path: str) -> str:
    import torch

    from fst._core.arguments import path_of
    from fst._core.source import Source

    source = Source(path_of(path))
    length = source.length()
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    for begin in range(0, length, BLOCK_BYTES):
        source.read(begin, block[: length - begin])
    return f"{length:,} bytes read"


def _finite(path: str) -> str:
    from fst._checkpoint.checkpoint import OpenCheckpoint

    not_finite = []
    checkpoint = OpenCheckpoint(path)
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        if (tensor.is_floating_point() or tensor.is_complex()) and not _is_finite(tensor):
            not_finite.append(name)
    if not_finite:
        raise ValueError(f"NaN or infinity in {format_count(len(not_finite), 'tensor')}: {', '.join(not_finite)}")
    return f"{format_count(len(checkpoint.names()), 'tensor')} without NaN and infinity"


def _is_finite(tensor: torch.Tensor) -> bool:
    import torch

    if tensor.dtype is torch.float4_e2m1fn_x2:
        return True  # F4 has neither NaN nor infinity.
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    return bool(torch.isfinite(tensor).all())
