"""Hints for arguments of optimizers that have other names in PyTorch."""

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
