"""The choice of what runs a load."""

import torch

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.arguments import Paths, VerifyRequest, paths_of, verify_of
from fst._core.encryption_key import EncryptionKey
from fst._core.loads import Loads, OperatorLoads
from fst._load.progress import CheckpointWithBar


def open_loads(
    paths: Paths, verify: VerifyRequest, encryption_key: EncryptionKey | None, progress: bool = False
) -> Loads:
    """Returns an object with the loads of a checkpoint. Compiled programs show no bar.

    Operators cost less per call than methods, and compilers can trace them. They take no keys, since graphs would
    contain them.
    """
    request = verify_of(verify)
    if progress and not torch.compiler.is_compiling():
        return CheckpointWithBar(paths, verify=request, encryption_key=encryption_key)
    if encryption_key is None:
        return OperatorLoads(paths_of(paths), request)
    return OpenCheckpoint(paths, verify=request, encryption_key=encryption_key)
