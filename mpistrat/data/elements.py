"""From items to elements: read, map, stack."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arrays import host_view, is_array, is_number
from mpistrat.data.casting import fitted
from mpistrat.data.order import Block, Reader
from mpistrat.data.random_numbers import MapCall, PassStream
from mpistrat.data.spec import ArraySpec
from mpistrat.data.transforms import Map
from mpistrat.errors import DataError

__all__ = ["ElementMaker"]

_READ_AHEAD = 256
"""How many examples are read at a time where they are handed out one by one."""


class ElementMaker:
    """Makes the elements of a data set from the items of its order.

    Parameters
    ----------
    reader : Reader
    example_maps : sequence of Map
        Applied to each example, in this order.
    batch_maps : sequence of Map
        Applied to each part of a batch, in this order.
    example_spec : callable
        Returns the nest of `ArraySpec` of one example after `example_maps`, whose dtypes all
        examples get. Asked only where there are such functions.
    stream : PassStream
        Where the functions get random numbers from.
    """

    def __init__(
        self,
        reader: Reader,
        example_maps: Sequence[Map],
        batch_maps: Sequence[Map],
        example_spec: Callable[[], Any],
        stream: PassStream,
    ) -> None:
        self._reader = reader
        self._example_maps = list(enumerate(example_maps))
        self._batch_maps = list(enumerate(batch_maps, len(example_maps)))
        self._example_spec = example_spec
        self._stream = stream

    def examples(self, block: Block, position: int) -> Iterator[Any]:
        """Yield the example of each item of `block`, the first at `position` of the pass. Local."""
        for start in range(0, len(block), _READ_AHEAD):
            rows = _rows(self._reader.read(block[start : start + _READ_AHEAD]))
            for number, example in enumerate(rows, position + start):
                yield self._apply(self._example_maps, example, (number,), is_batch=False)

    def batch(self, block: Block, part: slice, position: int) -> Any:
        """Return the nest of arrays of the items ``block[part]``; only these are read. Local.

        Parameters
        ----------
        block : Block
            The items of a global batch, at least one.
        part : slice
            May be empty: then the arrays have length 0.
        position : int
            Of the first example of the batch in the pass.

        Raises
        ------
        DataError
            If a map gives examples that do not stack, or do not fit the first of the data set.
        """
        mine = block[part]
        first = position + part.indices(len(block))[0]
        if self._example_maps:
            nest = _stack(self.examples(mine, first), self._example_spec())
        elif block.dtype == object and not len(mine):
            # Items that are examples cost nothing to look at, and know their shapes best.
            nest = nests.map_nest(lambda leaf: leaf[:0], self._reader.read(block[:1]))
        else:
            nest = self._reader.read(mine)
        positions = range(first, first + len(mine))
        return self._apply(self._batch_maps, nest, positions, is_batch=True)

    def _apply(
        self, maps: list[tuple[int, Map]], element: Any, positions: Sequence[int], is_batch: bool
    ) -> Any:
        for number, each in maps:
            make_rng = partial(self._stream.generator, each.seed, number)
            element = MapCall(make_rng, positions, is_batch).run(each.fn, element)
        return element


def _rows(nest: Any) -> Iterator[Any]:
    leaves, structure = nests.flatten(nest)
    for row in zip(*leaves, strict=True):
        yield nests.unflatten(structure, row)


def _stack(examples: Iterable[Any], spec: Any) -> Any:
    """Return the nest of stacked `examples`, each of them like `spec` but for its shape."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    places = [path or "the top" for path in paths]
    columns: list[list[np.ndarray]] = [[] for _ in specs]
    for example in examples:
        leaves, other = nests.flatten(example)
        if other != structure:
            raise DataError(
                f"map gave {other} for one example, but {structure} for the first of the data set."
            )
        for place, column, leaf, each in zip(places, columns, leaves, specs, strict=True):
            column.append(_cast(leaf, each, place))
    return nests.unflatten(structure, map(_stack_leaf, columns, specs, places))


def _cast(leaf: Any, spec: ArraySpec, place: str) -> np.ndarray:
    is_plain = is_array(leaf) or is_number(leaf) or isinstance(leaf, np.generic)
    if not is_plain or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {place!r}, but arrays and numbers were expected, so that "
            "examples can be stacked to a batch."
        )
    array = host_view(leaf)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map gave {reprlib.repr(array.tolist())} of dtype {array.dtype} at {place!r}, which "
            f"does not fit the dtype {spec.dtype} of the first example of the data set. Let the "
            "function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast


def _stack_leaf(column: list[np.ndarray], spec: ArraySpec, place: str) -> np.ndarray:
    if not column:
        return np.empty((0, *spec.known_shape), spec.dtype)
    shapes = sorted({array.shape for array in column})
    if len(shapes) > 1:
        raise DataError(
            f"map gave arrays of different shapes at {place!r}: {shapes[0]} and {shapes[1]}. The "
            "examples of a batch need one shape."
        )
    return np.stack(column)
