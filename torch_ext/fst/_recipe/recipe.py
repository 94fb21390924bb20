"""Recipes, as values."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fst._core import ops
from fst._core.arguments import Paths, list_of, paths_of
from fst._core.checkpoint import Checkpoint
from fst._core.encryption_key import EncryptionKey, core_key
from fst._recipe.quantized import dequantizing_rules
from fst._recipe.transformers import transformers_rules


class Recipe:
    """Rules that make the tensors of a load from the tensors of a checkpoint.

    A rule has one output: `"NAME = EXPRESSION"`. Expressions rename, slice, join, stack, permute and dequantize tensors
    of the checkpoint. `{k}` in a name stands for a component, and `{*p}` for one or more, so that one rule serves all
    layers. docs/converting.md lists the operations.

    Loads that take `recipe` return the outputs, in the order of the rules, instead of the tensors of the checkpoint,
    and write each element once, to its final place. Tensors that no rule reads are not loaded.

    A recipe does not change. Recipes with equal rules are equal, and can be pickled.

    Args:
        rules: The rules.

    Raises:
        TypeError: `rules` is not a list or tuple of str.
        ValueError: There is no rule, or a rule is not valid. The message has its number and the column.

    Example:
        >>> recipe = fst.Recipe(["linear.{k} = {k}"])
        >>> sorted(fst.load_file("model.safetensors", recipe=recipe))
        ['linear.bias', 'linear.weight']
    """

    __slots__ = ("_rules",)
    _rules: tuple[str, ...]

    def __init__(self, rules: Sequence[str]) -> None:
        texts = list_of(rules, str, "rules")
        if not texts:
            raise ValueError("a recipe needs a rule; `{*n} = {*n}` keeps all tensors")
        ops.call("check_rules", texts)
        object.__setattr__(self, "_rules", tuple(texts))

    @property
    def rules(self) -> tuple[str, ...]:
        """The texts of the rules."""
        return self._rules

    @classmethod
    def of_transformers(cls, source: Any) -> Self:
        """Returns the recipe with which transformers loads a model.

        It is recorded from the conversions of the installed transformers, 5.20 to 5.24, and so holds for the model that
        this release builds. Only headers and the configuration are read. Tensors that transformers does not use are not
        part of the recipe, and neither are casts. Quantized weights of a directory are dequantized.

        Args:
            source: The directory or URL of a checkpoint with its `config.json`. Or a configuration of a model: the
                names of the checkpoint are then those that `save_pretrained` writes.

        Raises:
            ImportError: transformers is not installed, or is another release.
            ValueError: transformers has no model for the configuration, or computes something during its conversion
                that recipes do not have. The message names the parameter and the operation.
        """
        return cls(transformers_rules(source))

    @classmethod
    def dequantizing(cls, paths: Paths, *, encryption_key: EncryptionKey | None = None) -> Self:
        """Returns the recipe that `dequantize=True` uses: quantized tensors become numbers, others stay as they are.

        The scheme follows from the headers, and from the `quantization_config` in a `config.json` beside the files or
        objects: FP8 and INT8 with scales of blocks, rows or tensors; MXFP4 of gpt-oss; MXFP4 and NVFP4 of
        compressed-tensors; NVFP4 of ModelOpt. The numbers are bfloat16, unless a load has another `dtype`. Scales of
        activations are left out.

        Args:
            paths: As in `load_file`.
            encryption_key: As in `load_file`.

        Raises:
            ValueError: No tensor is quantized, a scale is missing or has another shape than the block requires, or the
                scheme is not known.
        """
        texts = paths_of(paths)
        checkpoint = Checkpoint(texts, None, "", core_key(encryption_key))
        return cls(dequantizing_rules(texts, checkpoint))

    def outputs(self, paths: Paths, *, encryption_key: EncryptionKey | None = None) -> dict[str, Tensor]:
        """Returns the tensors that a load would return, on meta. Only headers are read.

        Args:
            paths: As in `load_file`.
            encryption_key: As in `load_file`.

        Raises:
            ValueError: The rules do not fit the checkpoint.

        Example:
            >>> outputs = fst.Recipe(["first = slice(weight, 0, 0, 1)"]).outputs("model.safetensors")
            >>> outputs["first"].shape
            torch.Size([1, 3])
        """
        checkpoint = Checkpoint(paths_of(paths), None, "", core_key(encryption_key))
        names = [output.name for output in checkpoint.recipe(self._rules)[0]]
        return dict(zip(names, checkpoint.load_recipe(names, self._rules, torch.device("meta")), strict=True))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Recipe does not change; create another one to set {name}")

    def __repr__(self) -> str:
        return f"Recipe({list(self._rules)!r})"

    def __eq__(self, other: object) -> bool:
        return self._rules == other._rules if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return Recipe, (list(self._rules),)


def recipe_of(recipe: "Recipe | Sequence[str] | None") -> tuple[str, ...]:
    """Returns the rules of a recipe, or of a list of rules. Empty for `None`."""
    if recipe is None:
        return ()
    return recipe.rules if isinstance(recipe, Recipe) else Recipe(recipe).rules
