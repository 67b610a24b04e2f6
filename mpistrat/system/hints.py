"""Base classes whose errors name the replacement for a name that a beginner would guess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

OPTIMIZER_ARGUMENTS = {
    "lr": "learning_rate=",
    "betas": "beta_1= and beta_2=",
    "eps": "epsilon=",
    "params": "no variables: they are passed to apply_gradients([(gradient, variable), ...])",
    "clipnorm": "global_clipnorm=",
    "max_norm": "global_clipnorm=",
}
"""Arguments of PyTorch's optimizers, and their replacements in this package."""


class Hinted:
    """Base class that adds hints to errors for missing attributes and foreign arguments."""

    _argument_hints: ClassVar[Mapping[str, str]] = {}
    """Names of arguments in other libraries, and their replacements."""

    if not TYPE_CHECKING:  # with it, type checkers would not report undefined attributes

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
            hints = cls._argument_hints
            for name in kwargs.keys() & hints.keys():
                raise TypeError(f"{cls.__name__} has no argument {name!r}. Write {hints[name]}.")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            from mpistrat.system.migration import missing_attribute  # rarely needed

            raise missing_attribute(self, type(self), name)


class HintedType(type):
    """Metaclass of a class whose missing class methods raise an `AttributeError` with a hint."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            from mpistrat.system.migration import missing_attribute

            raise missing_attribute(cls, cls, name)
