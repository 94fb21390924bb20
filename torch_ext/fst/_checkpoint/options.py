"""Options of functions that read checkpoints. `load_file` describes them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from fst._core.arguments import Dtype
from fst._core.encryption_key import EncryptionKey
from fst._recipe.recipe import Recipe, recipe_of
from fst._signatures.request import VerifyRequest, verify_of

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ReadOptions(TypedDict, total=False):
    """Options of all functions that read data."""

    verify: VerifyRequest
    encryption_key: EncryptionKey | None
    recipe: Recipe | Sequence[str] | None
    dequantize: bool


class LoadOptions(ReadOptions, total=False):
    """Options of loads into new tensors."""

    dtype: Dtype
    progress: bool


_DEFAULTS = {
    "verify": False,
    "encryption_key": None,
    "recipe": None,
    "dequantize": False,
    "dtype": None,
    "progress": False,
}


class Reading(NamedTuple):
    """Options of `ReadOptions`, checked.

    Attributes:
        verify: The request to verify data, as the text that operators take.
        encryption_key: The key of encrypted files.
        rules: The rules of a recipe. Empty for the tensors as they are stored, and `None` for rules that dequantize,
            which follow from the headers.
    """

    verify: str = ""
    encryption_key: EncryptionKey | None = None
    rules: tuple[str, ...] | None = ()

    @property
    def is_stored(self) -> bool:
        """Whether reads return the tensors as they are stored."""
        return self.rules == ()


# Neither verified nor decrypted by a key of the call, and as stored.
PLAIN = Reading()


def reading_of(
    *,
    verify: VerifyRequest = False,
    encryption_key: EncryptionKey | None = None,
    recipe: Recipe | Sequence[str] | None = None,
    dequantize: bool = False,
    **unknown: object,
) -> Reading:
    """Checks `ReadOptions`. Raises TypeError for other names."""
    if unknown:
        raise TypeError(f"unexpected keyword argument {next(iter(unknown))!r}")
    if dequantize and recipe is not None:
        raise ValueError(
            "recipe and dequantize=True exclude each other; put the rules of fst.Recipe.dequantizing into the recipe"
        )
    return Reading(verify_of(verify), encryption_key, None if dequantize else recipe_of(recipe))


def with_options(options: type[ReadOptions]) -> Callable[[_Function], _Function]:
    """Returns a decorator that lists the options in the signature of a function, in place of its last parameter.

    `help` and editors show them then. The function itself is unchanged, so that calls cost nothing.
    """
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=annotation)
        for name, annotation in options.__annotations__.items()
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()
        function.__signature__ = signature.replace(parameters=[*parameters, *listed])  # pyrefly: ignore
        return function

    return decorate
