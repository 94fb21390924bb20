"""Loads that verify or decrypt the data, and loads of files that another program has verified just before."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .base import KEY, Job, Tensors
from .fst import Fst
from .safetensors import Safetensors


def of_originals(job: Job) -> Job:
    """Returns the job on the safetensors files that were converted for this job."""
    return replace(job, paths=[str(Path(path).with_suffix(".safetensors")) for path in job.paths])


class FstDigests(Fst):
    """Compares the digests of the tensors, which the file has."""

    def __init__(self, algorithm: str, strategy: str = "auto") -> None:
        super().__init__(strategy, verify=True)
        self._algorithm: Any = algorithm

    def convert(self, path: str, target: str) -> None:
        self._fst.save_file(self._fst.load_file(path), target, digests=self._algorithm)


class FstManifest(Fst):
    """Compares the digest of the file with what sha256sum prints."""

    def load(self, job: Job) -> Tensors:
        [path], [original] = job.paths, of_originals(job).paths
        tensors: Tensors = self._fst.load_file(original, job.device, verify=self._proof(path))
        return tensors

    def reader(self, job: Job) -> str:
        return super().reader(of_originals(job))

    def convert(self, path: str, target: str) -> None:
        _write_sha256(path, target)

    def _proof(self, path: str) -> Any:
        return path


class FstSignature(FstManifest):
    """Verifies a signature, and compares the digest of the file that was signed."""

    def convert(self, path: str, target: str) -> None:
        private = Path(target).with_suffix(".key.pem")
        openssl = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private)]
        subprocess.run(openssl, check=True)
        openssl = ["openssl", "ec", "-in", str(private), "-pubout", "-out", str(_public_key(target))]
        subprocess.run(openssl, check=True, capture_output=True)
        sign = [sys.executable, "-m", "fst", "sign", path, "--private-key", str(private), "--signature", target]
        subprocess.run(sign, check=True, capture_output=True)

    def _proof(self, path: str) -> Any:
        return self._fst.Signature(path, public_key=_public_key(path))


class FstEncrypted(Fst):
    """Loads files that fst has encrypted."""

    def __init__(self) -> None:
        super().__init__()
        self._options = {"encryption_key": self._fst.EncryptionKey.from_bytes(KEY)}

    def convert(self, path: str, target: str) -> None:
        self._fst.save_file(self._fst.load_file(path), target, **self._options)

    def reader(self, job: Job) -> str:
        return "pread"  # The operator that tells takes no key.


class Sha256sumFirst(Safetensors):
    """Lets sha256sum compare the file, and then loads it."""

    def load(self, job: Job) -> Tensors:
        for path in job.paths:
            subprocess.run(["sha256sum", "--check", "--quiet", path], cwd=Path(path).parent, check=True)
        return super().load(of_originals(job))

    def convert(self, path: str, target: str) -> None:
        _write_sha256(path, target)


class ModelSigningFirst(Safetensors):
    """Lets the package model-signing verify the file, and then loads it."""

    def __init__(self) -> None:
        super().__init__()
        import model_signing.verifying

        self._verifying = model_signing.verifying

    def load(self, job: Job) -> Tensors:
        [path], originals = job.paths, of_originals(job)
        config = self._verifying.Config().use_elliptic_key_verifier(public_key=_public_key(path))
        config.verify(Path(originals.paths[0]), Path(path))
        return super().load(originals)


def _write_sha256(path: str, target: str) -> None:
    summed = subprocess.run(["sha256sum", Path(path).name], cwd=Path(path).parent, capture_output=True, check=True)
    Path(target).write_bytes(summed.stdout)


def _public_key(signature: str) -> Path:
    return Path(signature).with_suffix(".pub.pem")
