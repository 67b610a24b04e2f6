"""A source that only runs forwards: a Python generator."""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.casting import fitted
from mpistrat.data.function_names import function_name
from mpistrat.data.order import UNKNOWN, Block, ChunkLayout
from mpistrat.data.spec import ArraySpec
from mpistrat.errors import DataError

__all__ = ["GeneratorSource"]


class GeneratorSource:
    """The elements of ``fn()``, which is called anew for each pass.

    An item of its stream is the list of the arrays of one example.

    Raises
    ------
    TypeError
        If `fn` is not callable or `element_spec` is no nest of `ArraySpec` of fixed dtypes.
    """

    def __init__(self, fn: Callable[[], Iterable[Any]], element_spec: Any) -> None:
        if not callable(fn):
            raise TypeError(
                f"from_generator needs a function that returns an iterable, not {fn!r}."
            )
        self._paths, self._specs, self._structure = nests.flatten_with_paths(element_spec)
        for spec in self._specs:
            if not isinstance(spec, ArraySpec):
                raise TypeError(f"element_spec must be a nest of ArraySpec, not of {spec!r}.")
            if spec.dtype.hasobject:
                raise TypeError(f"element_spec must have fixed dtypes, not object: {spec!r}.")
        self._fn = fn
        self._last: weakref.ref[Any] | None = None
        self.element_spec = element_spec

    @property
    def num_examples(self) -> int:
        """Unknown until the generator ends."""
        return UNKNOWN

    @property
    def layout(self) -> ChunkLayout | None:
        """None: examples come when they come."""
        return None

    @property
    def kind(self) -> str:
        """The method, and the name of the function."""
        return f"from_generator({function_name(self._fn)})"

    @property
    def parts(self) -> list[str]:
        """Nothing: the generator alone decides."""
        return []

    def stream(self) -> Iterator[Block]:
        """Return one item for each element of a new generator. Local."""
        for number, element in enumerate(self._begun()):
            item = np.empty(1, object)
            item[0] = self._checked(element, number)
            yield item

    def _begun(self) -> Iterator[Any]:
        """Return a new iterator."""
        elements = self._fn()
        try:
            iterator = iter(elements)
        except TypeError:
            raise DataError(
                f"{self.kind}: the function returned {elements!r} of type "
                f"{type(elements).__name__}, but an iterable was expected."
            ) from None
        if iterator is elements and isinstance(iterator, Generator):
            if self._last is not None and self._last() is iterator:
                raise DataError(
                    f"{self.kind}: the function returned the same generator as for the pass "
                    "before, which is used up. Let it make a new one each time it is called."
                )
            self._last = weakref.ref(iterator)
        return iterator

    def _checked(self, element: Any, number: int) -> list[np.ndarray]:
        leaves, structure = nests.flatten(element)
        if structure != self._structure:
            raise DataError(
                f"from_generator: element {number} is {structure}, but element_spec is "
                f"{self._structure}."
            )
        return [
            self._checked_leaf(leaf, spec, path, number)
            for leaf, spec, path in zip(leaves, self._specs, self._paths, strict=True)
        ]

    def _checked_leaf(self, leaf: Any, spec: ArraySpec, path: str, number: int) -> np.ndarray:
        # The generator may fill the same array again, so the example keeps a copy.
        array = np.array(leaf)
        cast = None if isinstance(leaf, np.ma.MaskedArray) else fitted(array, spec.dtype)
        if cast is None or not spec.fits(cast):
            raise DataError(
                f"from_generator: {path or 'the array'!r} of element {number} is "
                f"{reprlib.repr(array.tolist())}, of dtype {array.dtype} and shape {array.shape}, "
                f"which does not fit the element_spec {spec}."
            )
        return cast

    lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Nothing to prepare: the items are the examples. Local."""

    def open(self, window_rows: int) -> GeneratorSource:
        """Return the source itself: its items are the examples. Local."""
        return self

    def read(self, block: Block) -> Any:
        """Return the examples of `block`, stacked. Local."""
        columns = zip(*block, strict=True) if len(block) else [()] * len(self._specs)
        stacked = [
            self._stacked(column, spec, path)
            for column, spec, path in zip(columns, self._specs, self._paths, strict=True)
        ]
        return nests.unflatten(self._structure, stacked)

    def _stacked(self, column: tuple[np.ndarray, ...], spec: ArraySpec, path: str) -> np.ndarray:
        if not column:
            return np.empty((0, *spec.known_shape), spec.dtype)
        shapes = sorted({array.shape for array in column})
        if len(shapes) > 1:
            raise DataError(
                f"from_generator: {path or 'the array'!r} has different shapes within one batch: "
                f"{shapes[0]} and {shapes[1]}. Pad the examples to one shape."
            )
        return np.stack(column)

    def close(self) -> None:
        """Nothing to release."""
