"""Matching of a module's tensors with a checkpoint's."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fst._ranks.dtensors import is_dtensor, local_tensor
from fst._ranks.meshes import MeshLayouts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Part of the names of a compiled module.
_COMPILED = "_orig_mod."
_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass
class ModuleTensor:
    """Parameter or buffer of a module, with all its names.

    Attributes:
        tensors: The parameter or buffer; several objects if they share their storage.
        keys: Names in the module; several if the tensor is tied.
        stored_names: Names in the checkpoint, in the order of `keys`.
    """

    tensors: list[Tensor] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    stored_names: list[str] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor:
        return self.tensors[0]


@dataclass
class Match:
    """Result of matching a module with a checkpoint.

    Lists are in the order of the module, as in `load_state_dict`.

    Attributes:
        tensors: Parameters and persistent buffers.
        extra_states: Modules with an extra state, and its name in the checkpoint.
        counters: `num_batches_tracked` buffers that the checkpoint lacks. Files of older versions lack them; their
            value is zero.
        missing: Names that the checkpoint lacks.
        unexpected: Names that the module lacks.
        misshapen: Names whose shapes differ.
        problems: Messages for all mismatches that are errors even if loading is not strict.
    """

    tensors: list[ModuleTensor] = field(default_factory=list)
    extra_states: list[tuple[Module, str]] = field(default_factory=list)
    counters: list[Tensor] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def match_tensors(module: Module, stored: Mapping[str, Tensor]) -> Match:
    """Matches a module with the tensors of a checkpoint, which are on meta.

    Resolves names as `load_state_dict` does, and calls the same pre-hooks. Names that begin with a dot, as tensorizer
    writes the names of a root module's tensors, lose it.
    """
    matcher = _Matcher(stored)
    matcher.visit(module, {_key_of(name, stored): tensor for name, tensor in stored.items()}, "")
    match = matcher.match
    # A tied tensor needs only one of its names.
    found = {key for tensor in match.tensors if tensor.stored_names for key in tensor.keys}
    match.missing = [key for key in match.missing if key not in found]
    return match


def name_problems(missing: Sequence[str], unexpected: Sequence[str], side: str) -> list[str]:
    """Returns messages for names that only the checkpoint or only the module or target, called `side`, has."""
    problems, missing, unexpected = wrapped_names(missing, unexpected, side)
    problems += [f"missing in the checkpoint: {quote(missing)}"] if missing else []
    return problems + ([f"missing in the {side}: {quote(unexpected)}"] if unexpected else [])


def wrapped_names(
    missing: Sequence[str], unexpected: Sequence[str], side: str
) -> tuple[list[str], Sequence[str], Sequence[str]]:
    """Returns one message for all names that differ by a prefix, as in a wrapped module, and the other names."""
    problems = []
    prefix, differing = _prefix(missing, unexpected)
    if differing:
        inner = prefix[:-1] if all(map(str.isidentifier, prefix[:-1].split("."))) else f'get_submodule("{prefix[:-1]}")'
        has, lacks, way = side, "checkpoint", f"pass model.{inner}"
        if side != "module":
            way = f'pass the tensors under names without it, such as name.removeprefix("{prefix}")'
    else:
        prefix, differing = _prefix(unexpected, missing)
        has, lacks, way = "checkpoint", side, f'pass the tensors under names with it, such as "{prefix}" + name'
        if side == "module":
            wrapped = "model"
            for part in reversed(prefix[:-1].split(".")):
                wrapped = f'torch.nn.ModuleDict({{"{part}": {wrapped}}})'
            way = f"pass {wrapped}"
    if differing:
        longer = {prefix + name for name in differing}
        missing = [name for name in missing if name not in differing and name not in longer]
        unexpected = [name for name in unexpected if name not in differing and name not in longer]
        count = f"{len(differing):,}" if missing or unexpected else "all"
        problems.append(
            f'{count} names differ by the prefix "{prefix}", which the {has} has and the {lacks} lacks: {way}'
        )
    else:
        # Layers that were compiled one by one have a part in the middle of their names.
        plain = {name.replace(_COMPILED, "") for name in missing} & set(unexpected)
        if plain:
            missing = [name for name in missing if name.replace(_COMPILED, "") not in plain]
            unexpected = [name for name in unexpected if name not in plain]
            problems.append(
                f'{len(plain):,} names of the {side} have "{_COMPILED}", which torch.compile adds: '
                "load before it, or compile layers in place with Module.compile()"
            )
    return problems, missing, unexpected


def _prefix(longer: Sequence[str], shorter: Sequence[str]) -> tuple[str, set[str]]:
    """Returns the prefix without which most of the longer names are among the shorter ones, and these."""
    known = set(shorter)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in longer:
        for dot, character in enumerate(name):
            if character == "." and name[dot + 1 :] in known:
                found[name[: dot + 1]].add(name[dot + 1 :])
    prefix, differing = max(found.items(), key=lambda item: len(item[1]), default=("", set()))
    return (prefix, differing) if 2 * len(differing) >= len(known) else ("", set())


def quote(names: Sequence[str]) -> str:
    """Returns names in quotes, with commas between them."""
    return ", ".join(f'"{name}"' for name in names)


def _key_of(name: str, stored: Mapping[str, Tensor]) -> str:
    key = name.removeprefix(".")
    return name if key in stored else key


def own_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and persistent buffers of a module, but not of its children."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def module_tensors(module: Module) -> Iterator[Tensor]:
    """Yields the parameters and persistent buffers of a module and its descendants."""
    for child in module.modules():
        for _, tensor in own_tensors(child):
            yield tensor


def non_persistent_buffers(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the non-persistent buffers of a module and its descendants. Checkpoints do not hold them."""
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(name)
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer


def fill_problem(tensor: Tensor) -> str | None:
    """Returns the reason why a load cannot write to a tensor, or `None` if it can."""
    if is_lazy(tensor):
        return "it has no shape yet; call the module once first"
    if is_dtensor(tensor):
        return _dtensor_mismatch(tensor)
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} has no storage of its own; fill the tensors that it wraps"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "it is not dense; use load_state_dict"
    return None


def _dtensor_mismatch(tensor: "DTensor") -> str | None:
    """Returns the reason why a load cannot write to the local tensor of a DTensor, or `None` if it can."""
    if any(placement.is_partial() for placement in tensor.placements):
        return f"its placements {tensor.placements} include a pending reduction"
    if tensor.device_mesh.get_coordinate() is None:
        return None
    layout = MeshLayouts(None).of(tensor.device_mesh, tensor.placements)
    local, expected = local_tensor(tensor), layout.local(tensor.shape)
    if local.shape != expected.shape:
        # PyTorch does not support this layout either: `full_tensor` hangs.
        return (
            f"the local tensor of this rank has the shape {list(local.shape)}, but its placements {tensor.placements} "
            f"give {list(expected.shape)}; a dimension that is sharded twice has to divide evenly"
        )
    return fill_problem(local)


class _Matcher:
    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self.match = Match()
        self._stored_names = {id(tensor): name for name, tensor in stored.items()}
        self._by_identity: dict[Any, ModuleTensor] = {}

    def visit(self, module: Module, stored: dict[str, Tensor], prefix: str) -> None:
        """Visits modules as `load_state_dict` does. Each sees the names below it, as the hooks above changed them."""
        match = self.match
        for hook in module._load_state_dict_pre_hooks.values():
            hook(stored, prefix, {}, True, match.missing, match.unexpected, match.problems)
        if not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules."):
            match.problems.append(
                f'module "{prefix[:-1]}": {type(module).__name__} overrides _load_from_state_dict; use load_state_dict'
            )
        tensors = dict(own_tensors(module))
        for name, tensor in tensors.items():
            self._add(module, prefix, name, tensor, stored.get(prefix + name))
        self._add_extra_state(module, prefix + _EXTRA_STATE, stored)
        for key in stored:
            head, dot, _ = key[len(prefix) :].partition(".")
            # A child may be `None`, for an omitted part of a model. Names below it are expected, and not loaded.
            if head not in (module._modules if dot else tensors) and key != prefix + _EXTRA_STATE:
                match.unexpected.append(key)
        for name, child in module._modules.items():
            if child is not None:
                child_prefix = f"{prefix}{name}."
                child_stored = {key: tensor for key, tensor in stored.items() if key.startswith(child_prefix)}
                self.visit(child, child_stored, child_prefix)

    def _add(self, module: Module, prefix: str, name: str, tensor: Tensor, stored: Tensor | None) -> None:
        match, key = self.match, prefix + name
        module_tensor = self._by_identity.get(identity_of(tensor))
        if module_tensor is None:
            module_tensor = self._by_identity[identity_of(tensor)] = ModuleTensor()
            match.tensors.append(module_tensor)
        if not any(tensor is other for other in module_tensor.tensors):
            module_tensor.tensors.append(tensor)
        module_tensor.keys.append(key)
        if stored is None:
            if name == "num_batches_tracked" and isinstance(module, _NormBase):
                match.counters.append(tensor)
            else:
                match.missing.append(key)
            return
        stored_names, problem = self._stored_names_of(key, stored), fill_problem(tensor)
        if problem is not None:
            match.problems.append(f'"{key}": {problem}')
        elif stored.shape != tensor.shape:
            match.misshapen.append(key)
            match.problems.append(
                f'"{key}": shape {list(stored.shape)} in the checkpoint, {list(tensor.shape)} in the module'
            )
        module_tensor.stored_names += stored_names

    def _add_extra_state(self, module: Module, key: str, stored: Mapping[str, Tensor]) -> None:
        has_extra_state = type(module).set_extra_state is not Module.set_extra_state
        if has_extra_state and key in stored:
            self.match.extra_states += [(module, name) for name in self._stored_names_of(key, stored[key])]
        elif has_extra_state:
            self.match.missing.append(key)
        elif key in stored:
            self.match.unexpected.append(key)

    def _stored_names_of(self, key: str, stored: Tensor) -> list[str]:
        """Returns the checkpoint's name of a tensor; an empty list, and a problem, if a hook created the tensor."""
        name = self._stored_names.get(id(stored))
        if name is None:
            self.match.problems.append(f'"{key}": a hook computes it from stored tensors; use load_state_dict')
        return [] if name is None else [name]


def identity_of(tensor: Tensor) -> Any:
    """Returns a key that is equal for the same tensor object, and for equal views of the same storage."""
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
