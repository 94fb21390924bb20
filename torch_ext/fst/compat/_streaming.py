"""Placement of whole tensors, which several packages pass to collective loads."""

from types import EllipsisType

# Index that places whole tensors on every rank. `Replicate` of torch.distributed.tensor takes long to import.
WHOLE: EllipsisType = ...
