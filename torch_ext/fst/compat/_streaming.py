"""Arguments of `fst.stream` and `fst.stream_sharded` that several packages pass."""

from inspect import signature
from types import EllipsisType

import fst

# Default window of `fst.stream`, in bytes.
DEFAULT_WINDOW_BYTES: int = signature(fst.stream).parameters["window_bytes"].default

# Index that places whole tensors on every rank. `Replicate` of torch.distributed.tensor takes long to import.
WHOLE: EllipsisType = ...
