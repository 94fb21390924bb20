"""Options of loads, and the choice of what runs a load."""

from typing import NamedTuple

import torch

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Device, Dtype, Paths, VerifyRequest, device_of, dtype_of, paths_of, verify_of
from fst._core.encryption_key import EncryptionKey
from fst._core.ops import OperatorLoads
from fst._load.progress import CheckpointWithBar


class LoadOptions(NamedTuple):
    """Options of a load, of which `device`, `dtype` and `verify` are as operators take them."""

    device: torch.device | str
    dtype: Dtype
    verify: str
    encryption_key: EncryptionKey | None
    progress: bool

    @classmethod
    def of(
        cls,
        device: Device,
        dtype: Dtype,
        verify: VerifyRequest,
        encryption_key: EncryptionKey | None,
        progress: bool = False,
    ) -> "LoadOptions":
        """Normalizes the arguments of a public function."""
        return cls(device_of(device), dtype_of(dtype), verify_of(verify), encryption_key, progress)

    def open(self, paths: Paths) -> OpenCheckpoint | OperatorLoads:
        """Returns an object with the loads of a checkpoint. Compiled programs show no bar."""
        if self.progress and not torch.compiler.is_compiling():
            return CheckpointWithBar(paths, verify=self.verify, encryption_key=self.encryption_key)
        return open_files(paths, self.verify, self.encryption_key)


def open_files(paths: Paths, verify: str, encryption_key: EncryptionKey | None) -> OpenCheckpoint | OperatorLoads:
    """Returns an object with the loads of a checkpoint.

    Operators cost less per call than methods, and compilers can trace them. They take no keys, since graphs would
    contain them.
    """
    if encryption_key is None:
        return OperatorLoads(paths_of(paths), verify)
    return OpenCheckpoint(paths, verify=verify, encryption_key=encryption_key)
