"""Hints for arguments and attributes of optimizers that have other names in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpistrat import context

_ARGUMENTS = {
    "lr": "learning_rate=",
    "betas": "beta_1= and beta_2=",
    "eps": "epsilon=",
    "params": "no variables: they are passed to apply_gradients([(gradient, variable), ...])",
    "clipnorm": "global_clipnorm=",
    "max_norm": "global_clipnorm=",
}


_ATTRIBUTES = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "betas": "beta_1 and beta_2",
    "clipnorm": "global_clipnorm",
    "param_groups": "learning_rate, which all variables share",
}


class RefusesOtherNames:
    """Base of optimizers, which refuses to set attributes that have a different name here.

    Python would create the attribute, and the optimizer would keep its old value. Classes of
    programs may have attributes of these names.
    """

    if not TYPE_CHECKING:  # type checkers report what is not declared

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _ATTRIBUTES and type(self).__module__.startswith("mpistrat."):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}, so setting it would change "
                    f"nothing. Set {_ATTRIBUTES[name]}."
                )
            super().__setattr__(name, value)


class HintedOptimizer(context.MadeInScope):
    """Metaclass of optimizers, which refuses PyTorch's names of arguments with a hint."""

    if not TYPE_CHECKING:  # to a type checker every object would be Any

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            """Create an optimizer."""
            for name in kwargs.keys() & _ARGUMENTS.keys():
                raise TypeError(
                    f"{cls.__name__} has no argument {name!r}. Write {_ARGUMENTS[name]}."
                )
            return super().__call__(*args, **kwargs)
