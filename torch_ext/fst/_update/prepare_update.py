"""`prepare_update`: reads and stages new values of existing tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from fst._checkpoint.options import ReadOptions, reading_of, with_options
from fst._core import ops
from fst._core.arguments import Device, Paths, Size, list_of, paths_of, size_of
from fst._core.errors import VersionError
from fst._core.group import Group
from fst._core.interrupts import defer_interrupts
from fst._module.shards import meshes_of
from fst._ranks.dtensors import reshard
from fst._ranks.meshes import enclosing_mesh, mesh_device, mesh_group
from fst._update.checkpoint import prepare_from_checkpoint
from fst._update.delta import prepare_from_delta
from fst._update.plan import Request, Staging, Transform
from fst._update.source import Source, UpdateSource, open_source, source_of
from fst._update.staged_update import StagedChange, StagedUpdate
from fst._update.target import Part, Target, aliases_of, memory_of, named_tensors, storages_of, update_problem
from fst._update.update import Plan, Step, Update

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

# Size of the changes between two events of a commit, in bytes.
_STEP_BYTES = 64 << 20


@with_options(ReadOptions)
def prepare_update(
    target: Target,
    source: Paths,
    *,
    names: Sequence[str] | None = None,
    version: str | None = None,
    strict: bool = True,
    transform: Transform | None = None,
    base: Mapping[str, Tensor] | None = None,
    atomic: bool = True,
    staging_device: Device = None,
    staging_bytes: Size | None = None,
    group: "ProcessGroup | None" = None,
    **options: "Unpack[ReadOptions]",
) -> Update:
    """Prepares an update of live weights: reads, checks and stages new values, while the old ones stay in use.

    `Update.commit` then writes the values in place, without reading any file. All or nothing: an error before the
    commit, `Update.rollback`, or dropping the object leave every byte as it was. Names, shapes and dtypes are checked
    before data is read. If the target holds DTensors, or with `group`, all ranks call this function, and all commit or
    none does.

    The tensors get the version of the source. Other loads and updates of the same tensors from the beginning of
    `prepare_update` on make the commit an error. So does another tensor in the place of one of the target, such as
    after `Module.to`. docs/updates.md has examples, and says what other threads and streams see.

    Args:
        target: A module, a mapping of names to tensors, or a list of tensors. The tensors have values: load the first
            version with `load_module`. Parameters, buffers, views and DTensors keep their addresses.
        source: A path or a list of paths, each as in `load_file`, which together are one checkpoint. Or a delta, or a
            chain of deltas with the oldest first, as `save_delta` writes them, or sparse patches, as TRL writes them:
            only the elements that change are staged and written. Deltas need a target that holds the bytes of the
            checkpoint, or slices of them, in the version that the first delta changes.
        names: For a list of tensors, their names in the checkpoint.
        version: The version of the source. `None` takes the one in the metadata of the checkpoint's index, if any.
        strict: Whether names that only the target or only the checkpoint has are errors. Names of a checkpoint that a
            list lacks never are.
        transform: A function of a name and a tensor of the checkpoint, called for each of them in the order of the
            files, with the tensor on the device of the target's tensor of the same name. It returns the new value of
            that tensor, or a mapping of names to the values of several, or `None`. The values have the shapes and
            dtypes of the target. If it raises, nothing is written. Deltas need `base` for it.
        base: For deltas to a target that holds other bytes than the checkpoint (cast, quantized, fused): the tensors of
            the base version by name, on the CPU. The deltas change them, too, with the same commit, and they get the
            same version. A `transform` is then called for all of them, in their order.
        atomic: If False, `commit` reads, and writes as bytes arrive. It stages 512 MiB at a time, or the largest
            tensor. After an error, the target holds a mixture of versions, and `version_of` raises until a load
            succeeds.
        staging_device: Device of staged values: `None` for the device of each tensor, or "cpu" for pinned host memory,
            from which a commit copies over the bus.
        staging_bytes: Upper bound for the size of staged values, and for the decoders of deltas, which may take 64 MiB
            in any case. `None` bounds staged values by the free memory, and decoders by 256 MiB or one tensor.
        group: Ranks that update together. `None` is the ranks of the mesh of the DTensors, or this process alone.
        verify: As in `load_file`, for a checkpoint and for each delta of a chain. Data is compared before anything is
            written, and deltas before they are decoded. The checksums of deltas, which only find damage, are always
            compared where this rank holds the whole tensor.
        encryption_key: As in `load_file`.
        recipe, dequantize: As in `load_file`, for a whole checkpoint. Deltas are a ValueError.

    Returns:
        An update to commit or roll back.

    Raises:
        VersionError: A delta changes another version than the target has.
        ModuleMismatchError: Names, shapes or dtypes do not fit, or the new values of a tied tensor differ between its
            names. Deltas have all of its names, unless `strict=False` or `base` lacks them.
        MemoryError: The staged values exceed `staging_bytes` or the free memory. Nothing was read.
        ValueError: A tensor cannot be overwritten, or the result of `transform` does not fit.
        RankError: Another rank failed.
        And the errors of `load_file`. Nothing was written.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> update = fst.prepare_update(linear, "model.safetensors", version="2026-11-25")
        >>> update.staged_bytes, fst.version_of(linear)
        (64, None)
        >>> update.commit()
        >>> fst.version_of(linear)
        '2026-11-25'
    """
    reading = reading_of(**options)
    staging_bytes = None if staging_bytes is None else size_of(staging_bytes, "staging_bytes", 0)
    device = None if staging_device is None else ops.current_device(staging_device)
    named, paths = named_tensors(target, names), paths_of(source)
    if base is not None:
        list_of(list(base.values()), Tensor, "base")
    with defer_interrupts():
        ranks = _ranks_of(target, named, group)

        def held() -> list[tuple[str, Tensor]]:
            if isinstance(target, Module):
                reshard(target)
            return named_tensors(target, names)

        ranks.run_on_all(lambda: _check_tensors(named))
        common = Request(
            target, named, aliases_of(named), ranks, Staging(device, staging_bytes), strict, transform, base
        )
        return _prepare(common, held, lambda: open_source(paths, ranks, reading), version, atomic)


def prepare_parts(
    parts: Sequence[Part], source: Paths | UpdateSource, *, version: str | None = None, model: Module | None = None
) -> Update:
    """Prepares an update of tensors that hold regions of a checkpoint's tensors, which the caller has found.

    Of each tensor, only its region is read. Tensors of the checkpoint without a part are not read. The update is staged
    in host memory, and prepared by this process alone. The source may be open. The tensors of `model`
    must stay in place until the commit. Otherwise as `prepare_update`.
    """
    named = [(part.name, part.tensor) for part in parts]
    with defer_interrupts():
        _check_tensors(named)
        target = [tensor for _, tensor in named]
        staging, group = Staging(torch.device("cpu"), None), Group.alone(torch.device("cpu"))
        common = Request(target, named, aliases_of(named), group, staging, True, None, None, parts)

        def opened() -> Source:
            return source_of(source if isinstance(source, UpdateSource) else UpdateSource(paths_of(source)))

        return _prepare(common, lambda: named if model is None else named_tensors(model), opened, version, True)


def _ranks_of(target: Target, named: Sequence[tuple[str, Tensor]], group: "ProcessGroup | None") -> Group:
    """Returns the ranks that update together: the ranks of a group, or of the meshes of DTensors, or this process."""
    if isinstance(target, Module):
        reshard(target)
    meshes = meshes_of(tensor for _, tensor in named)
    if group is None and meshes:
        group = mesh_group(enclosing_mesh(meshes))
    if group is not None:
        device = mesh_device(meshes[0]) if meshes else named[0][1].device if named else torch.device("cpu")
        return Group.of(group, device)
    return Group.alone(torch.device("cpu"))


def _check_tensors(named: Sequence[tuple[str, Tensor]]) -> None:
    for name, tensor in named:
        problem = update_problem(tensor)
        if problem is not None:
            raise ValueError(f'tensor "{name}" cannot be updated: {problem}')


def _prepare(
    common: Request,
    held: Callable[[], list[tuple[str, Tensor]]],
    open_all: Callable[[], Source],
    version: str | None,
    atomic: bool,
) -> Update:
    """Prepares an update. `held` returns the tensors that the target holds when it is called."""
    group, staging, tensors = common.group, common.staging, storages_of(common.named)
    both = [*tensors, *((f"{name} (base)", tensor) for name, tensor in (common.base or {}).items())]
    # Writes to the tensors count before any of their values is read.
    memory, staged = group.run_on_all(lambda: (memory_of(held()), StagedUpdate(both)))
    source = open_all()
    if source.deltas is not None:
        prepared = prepare_from_delta(common, source.deltas, source)
    else:
        assert source.checkpoint is not None
        prepared = prepare_from_checkpoint(common, source.checkpoint)
    version = source.version if version is None else version
    split: list[Step] = []
    if atomic:
        group.run_on_all(lambda: staging.check_parts(prepared.parts))

        def read() -> list[StagedChange]:
            return [change for batch in prepared.changes() for change in batch]

        changes = read() if prepared.is_collective else group.run_on_all(read)
        group.run_on_all(lambda: staged.stage(changes, version))
        # They do not keep the changes, of which `staged` frees the memory.
        split = list(_steps(staged, changes, common.aliases))

    def check() -> None:
        _check_memory(memory, memory_of(held()))
        # Without other ranks, the write begins at once, and checks the same.
        if group.size > 1:
            staged.check()

    def steps() -> Iterator[Step]:
        if atomic:
            yield from split
            return
        for batch in prepared.changes():
            staged.stage(batch, version)
            yield from _steps(staged, batch, common.aliases)

    plan = Plan(
        names=list(common.aliases),
        unchanged=[name for name, own in common.aliases.items() if own not in prepared.changing],
        group=group,
        staged=staged,
        check=check,
        steps=steps,
        after=prepared.after,
        is_atomic=atomic,
    )
    return Update(plan, version, source.deltas is not None, staged.staged_bytes(), prepared.unverified)


def _check_memory(before: list[tuple[str, object]], now: list[tuple[str, object]]) -> None:
    """Raises a VersionError if the target holds other tensors than when the update was prepared."""
    if before != now:
        changed = [each for each in before if each not in now] or [each for each in now if each not in before]
        name = changed[0][0] if changed else ""
        raise VersionError(
            f'tensor "{name}": the target holds another tensor, or another memory of it, than when this update was '
            "prepared, as after Module.to or an assignment; nothing was written. Prepare it again"
        )


def _steps(staged: StagedUpdate, changes: Sequence[StagedChange], aliases: Mapping[str, str]) -> Iterator[Step]:
    """Splits changes into steps. A tensor is complete after the step with its last change."""
    names: dict[str, list[str]] = {}
    for name, own in aliases.items():
        names.setdefault(own, []).append(name)
    last = {change.name: index for index, change in enumerate(changes)}
    begin, size = 0, 0
    for index, change in enumerate(changes):
        size += change.nbytes
        if size < _STEP_BYTES and index + 1 < len(changes):
            continue
        step = changes[begin : index + 1]
        complete = {each.name for each in step if last[each.name] <= index}
        yield Step(
            frozenset(name for own in complete for name in names.get(own, ())),
            frozenset(each.target.device for each in step),
            partial(staged.write, begin, index + 1),
        )
        begin, size = index + 1, 0
