"""Path, process group and plans of a reader or writer."""

import dataclasses
import os
import uuid
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from fst._core.arguments import Path, path_of
from fst._core.group import Group
from fst._core.urls import without_secrets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CPU = torch.device("cpu")

_Plan = TypeVar("_Plan", LoadPlan, SavePlan)


class CheckpointPath:
    """Path of the checkpoint that a reader or writer works on, and its process group."""

    def __init__(self, path: Path, group: "ProcessGroup | None") -> None:
        super().__init__()
        self.path = path_of(path)
        self._group = group
        # Distinguishes this load or save from others of the same path.
        self._id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint."""
        return self.path

    @property
    def _shown(self) -> str:
        """The path, as errors show it."""
        return without_secrets(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another load or save, of another path if one is passed. Closes or removes files of the last."""
        if checkpoint_id is not None:
            self.path = path_of(checkpoint_id)
        self._id = str(uuid.uuid4())

    def prepare_local_plan(self, plan: _Plan) -> _Plan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[_Plan]) -> list[_Plan]:
        """Adds the number of ranks to each plan."""
        return [dataclasses.replace(plan, storage_data=len(plans)) for plan in plans]

    def _group_of_plan(self, ranks: int | None) -> Group:
        """Returns the group that runs the plans of `ranks` ranks, or of an unknown number if a planner dropped it."""
        if self._group is not None:
            own = Group.of(self._group, CPU)
            if ranks is not None and ranks != own.size:
                raise ValueError(
                    f"{self._shown}: the call is for {ranks} ranks, and the group of the reader or writer has "
                    f"{own.size}; give both the same group"
                )
            return own
        is_world = ranks is not None and ranks > 1 and ranks == dist.get_world_size()
        return Group.of(None, CPU) if is_world else Group.alone(CPU)
