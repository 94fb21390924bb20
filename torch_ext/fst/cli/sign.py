"""`fst sign`: signs a model in the format of OpenSSF Model Signing."""

from __future__ import annotations

import argparse
import json
import os

from fst._core.urls import is_url, without_secrets
from fst._profile.formatting import visible
from fst.cli.arguments import check_output, expanded, size

# Name of the signature in the directory of a model.
SIGNATURE_NAME = "model.sig"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sign",
        help="sign the files of a model",
        description="Signs all files below a directory, or one file, with a private key of ECDSA on P-256, P-384 or "
        "P-521, by the package cryptography. `fst verify --signature`, loads with verify=fst.Signature(...), and the "
        "program model_signing verify the signature.",
    )
    parser.add_argument("path", type=expanded, metavar="PATH", help="the directory of the model, or its only file")
    parser.add_argument(
        "--private-key", type=expanded, required=True, metavar="FILE", help="the private key in PEM, not encrypted"
    )
    parser.add_argument(
        "--signature",
        type=expanded,
        metavar="FILE",
        help=f"the signature to write, by default {SIGNATURE_NAME} in the directory of the model",
    )
    parser.add_argument(
        "--signing-certificate", type=expanded, metavar="FILE", help="certificate of the key, for the signature"
    )
    parser.add_argument(
        "--certificate-chain",
        action="append",
        type=expanded,
        metavar="FILE",
        help="certificates of the issuers, for the signature; may be repeated",
    )
    parser.add_argument(
        "--digests",
        choices=["sha256", "blake2b", "blake3"],
        default="sha256",
        help="by default sha256. The program model_signing 1.1.1 does not verify blake2b",
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        metavar="SIZE",
        help='sign the digests of shards of this size, such as "1GB", so that one file is hashed by several threads',
    )
    add_rules(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, error=parser.error)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which files count."""
    parser.add_argument(
        "--ignore",
        action="append",
        metavar="PATH",
        help="ignore a file or directory, relative to the model's; may be repeated. Files of Git and the "
        "signature are always ignored",
    )
    parser.add_argument("--allow-symlinks", action="store_true", help="accept symbolic links to files")


def rules_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the rules in the arguments as the values that operators take."""
    return {"ignored": arguments.ignore or [], "allow_symlinks": arguments.allow_symlinks}


def run(arguments: argparse.Namespace) -> int:
    from fst._core import ops
    from fst._core.arguments import path_of, paths_of
    from fst._signatures.bundle import Signer

    directory = arguments.path if os.path.isdir(arguments.path) else os.path.dirname(arguments.path)
    target = path_of(arguments.signature or os.path.join(directory, SIGNATURE_NAME))
    if not is_url(target):
        check_output(target)
    chain = arguments.certificate_chain or []
    if arguments.signing_certificate is not None:
        chain = [arguments.signing_certificate, *chain]
    elif chain:
        arguments.error("a certificate chain needs the signing certificate; add --signing-certificate FILE")
    signer = Signer(path_of(arguments.private_key), paths_of(chain))
    request = {"path": target, "algorithm": arguments.digests, "shard_bytes": arguments.shard_size}
    statement = ops.call("model_statement", [request | rules_of(arguments), path_of(arguments.path)])
    ops.call("write_text", [target, signer.sign(statement)])
    path, signature = without_secrets(arguments.path), without_secrets(target)
    if arguments.json:
        print(json.dumps({"path": path, "signature": signature}, indent=2))
    else:
        print(visible(f"signed {path} in {signature}"))
    return 0
