"""Typed wrapper of `torch.classes.fst.Update`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fst._core.core_object import CoreObject
from fst._core.errors import translates_errors


class StagedChange(NamedTuple):
    """Change of a tensor that is staged, and not yet written.

    Attributes:
        name: Name of the tensor.
        target: Memory to overwrite: a dense tensor that is not on meta.
        positions: Numbers of the elements that change, ascending, as uint32, or `None` for all.
        values: Values of these elements, or of the whole target in its shape.
    """

    name: str
    target: Tensor
    positions: Tensor | None
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the positions and values in bytes."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


class StagedUpdate(CoreObject):
    """Changes of tensors that are written together.

    Args:
        named: All tensors that get the version, whether they change or not, with their names in errors. Their values
            have not been read for the update yet.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__("Update", [name for name, _ in named], [tensor for _, tensor in named])

    @translates_errors
    def stage(self, changes: Sequence[StagedChange], version: str | None) -> None:
        """Sets the changes, and the version of all tensors after them."""
        targets, positions = [change.target for change in changes], [change.positions for change in changes]
        self._object.stage(targets, positions, [change.values for change in changes], version)


def write_changes(changes: Sequence[StagedChange]) -> None:
    """Writes changes on the current streams of their devices, and keeps versions as they are."""
    update = StagedUpdate([])
    update.stage(changes, None)
    update.commit()
