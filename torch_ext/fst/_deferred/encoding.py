"""Views as the core takes them, which plans and runs their loads."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._core.checkpoint import load_views_into
from fst._core.dtypes import SCALAR_TYPES
from fst._deferred.view import Dequantized, Held, Joined, Stored, View


class Encoder:
    """Encoder of views for the core: rust/recipe/recorded.rs has the form.

    Attributes:
        checkpoints: The checkpoints whose tensors the views show.
        held: The tensors in memory that they show.
    """

    def __init__(self) -> None:
        self.checkpoints: dict[OpenCheckpoint, int] = {}
        self.held: list[Tensor] = []
        self._count = 0
        self._bases: list[Any] = []
        # Views share joined tensors.
        self._known: dict[int, int] = {}

    def encode(self, views: Iterable[View]) -> dict[str, Any]:
        """Returns the views. Each of them, and what it refers to, must live on."""
        encoded = [self._view(view) for view in views]
        return {"bases": self._bases, "views": encoded}

    def _view(self, view: View) -> Any:
        meta, base, _ = view
        number = self._known.get(id(base))
        if number is None:
            encoded = self._base(base)
            number = self._known[id(base)] = len(self._bases)
            self._bases.append(encoded)
        if meta is base.meta and not isinstance(base, Dequantized):
            return number
        return [number, meta.storage_offset(), meta.shape, meta.stride()]

    def _base(self, base: Stored | Dequantized | Held | Joined) -> dict[str, Any]:
        if isinstance(base, Stored):
            return {"stored": self._position(base)}
        dtype = SCALAR_TYPES[base.meta.dtype]
        if isinstance(base, Joined):
            return {"joined": [base.is_stack, base.dim, dtype, [self._view(view) for view in base.inputs]]}
        if isinstance(base, Held):
            self.held.append(base.tensor)
            return {"held": [len(self.held) - 1, dtype, base.meta.shape]}
        return {
            "numbers": {
                "codes": self._position(base.codes),
                "scales": self._position(base.scales),
                "scheme": base.scheme,
                "block": base.block,
                "grid": base.grid,
                "dtype": dtype,
            }
        }

    def _position(self, stored: Stored) -> int:
        checkpoint = stored.checkpoint
        first = self.checkpoints.get(checkpoint)
        if first is None:
            first = self.checkpoints[checkpoint] = self._count
            self._count += len(checkpoint.positions)
        return first + checkpoint.positions[stored.name]


def write_views(views: Sequence[View], out: Sequence[Tensor]) -> None:
    """Loads views into existing tensors of their shapes, with the casts of `Tensor.copy_`, in one load."""
    encoder = Encoder()
    encoded = encoder.encode(views)
    load_views_into([*encoder.checkpoints], encoded, encoder.held, out)
