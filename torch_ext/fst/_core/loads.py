"""Loads of a checkpoint, by operators or by open files."""
# Operators have no static types.
# pyrefly: ignore-errors[no-any-return-explicit]

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fst._core.compile  # noqa: F401  (registers the operators, their fakes and their effects)
from fst._core.arguments import CastDtype, dtype_arguments
from fst._core.errors import translates_errors
from fst._core.index_range import IndexRange, flatten

_Device = torch.device | str

# Operators that load outputs of rules, by the names of those that load tensors.
_RECIPE_LOADS = {"load_tensors": "load_recipe", "load_into": "load_recipe_into"}


class Loads(ABC):
    """Loads of a checkpoint, which raise Python exceptions."""

    @abstractmethod
    def _run(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls the load of this name in the core."""

    def load_files(self, device: _Device, dtype: CastDtype = None) -> dict[str, Tensor]:
        """Loads all tensors, in the order of the files. On "meta" it only returns their shapes and dtypes."""
        return self._run("load_files", device, **dtype_arguments(dtype))

    def load_tensors(self, names: Sequence[str], device: _Device, dtype: CastDtype = None) -> list[Tensor]:
        """Loads named tensors."""
        return self._run("load_tensors", names, device, **dtype_arguments(dtype))

    def load_slices(
        self, names: Sequence[str], slices: Sequence[Sequence[int]], device: _Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        """Loads a slice along one dimension of each named tensor. `slices` has all dims, starts and lengths."""
        return self._run("load_slices", names, *slices, device, **dtype_arguments(dtype))

    def load_boxes(
        self, names: Sequence[str], regions: Sequence[Sequence[IndexRange]], device: _Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        """Loads an index region of each named tensor."""
        return self._run("load_boxes", names, *flatten(regions), device, **dtype_arguments(dtype))

    def load_recipe(
        self, names: Sequence[str], rules: Sequence[str], device: _Device, dtype: CastDtype = None
    ) -> list[Tensor]:
        """Loads named outputs of the rules of a recipe."""
        return self._run("load_recipe", names, rules, device=device, **dtype_arguments(dtype))

    def overwrite(self, names: Sequence[str], out: Sequence[Tensor]) -> None:
        """Overwrites existing tensors of the stored shapes and dtypes.

        If digests were requested, the data are read and compared before anything is written.
        """
        self._run("load_into", names, out)


class OperatorLoads(Loads):
    """Loads by operators, which open the files in each call, and warn of tensors that are not verified as C++ does.

    With rules, `load_tensors` and `overwrite` load outputs of these.
    """

    def __init__(self, paths: Sequence[str], verify: str = "", rules: Sequence[str] = ()) -> None:
        self._paths = paths
        self._verify = verify
        self._rules = list(rules)

    @translates_errors
    def _run(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._rules:
            if name not in _RECIPE_LOADS:
                raise ValueError("compiled programs load outputs of a recipe with load_tensors and load_into only")
            names, *rest = arguments
            name, arguments = _RECIPE_LOADS[name], (names, self._rules, *rest)
        return getattr(torch.ops.fst, name)(self._paths, *arguments, verify=self._verify, **options)
