"""Classes that say what to write in place of an attribute that a beginner would guess."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Hinted:
    """Base of classes whose missing attributes raise an `AttributeError` with a hint."""

    if not TYPE_CHECKING:  # type checkers report what is not defined

        def __getattr__(self, name: str) -> Any:
            from mpistrat.system.migration import missing_attribute  # hardly ever needed

            raise missing_attribute(self, type(self), name)


class HintedType(type):
    """Metaclass of a class whose missing class methods raise an `AttributeError` with a hint."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            from mpistrat.system.migration import missing_attribute

            raise missing_attribute(cls, cls, name)
