"""Versions of live weights."""

from torch import Tensor

from fst._core import ops
from fst._update.target import Target, named_tensors, storages_of


def version_of(target: Target | Tensor) -> str | None:
    """Returns the version of the contents of tensors.

    `prepare_update` sets the version when it commits, and `set_version` does at any time. A load that overwrites
    tensors, such as `load_into`, removes it. The version belongs to the memory of a tensor: views and the
    `state_dict()` of a module have the version of the module. Any thread may call this function, also during an update.

    Args:
        target: A module, a mapping of tensors, a list of tensors, or a tensor. Of a DTensor, the version of the tensor
            of this rank counts.

    Returns:
        The version that all tensors have, or `None` if they have none.

    Raises:
        VersionError: The tensors have different versions, or an update with `atomic=False` failed and left a mixture.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> fst.set_version(linear, "000011")
        >>> fst.version_of(linear)
        '000011'
    """
    return ops.version_of(_storages_of(target))


def set_version(target: Target | Tensor, version: str | None) -> None:
    """Sets the version of the contents of tensors, which the caller knows. A delta needs the version of its base.

    Args:
        target: As in `version_of`.
        version: The version, or `None` to remove it.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> fst.set_version(linear, "000011")
    """
    ops.set_version([tensor for _, tensor in _storages_of(target)], version)


def _storages_of(target: Target | Tensor) -> list[tuple[str, Tensor]]:
    return storages_of([("", target)] if isinstance(target, Tensor) else named_tensors(target))
