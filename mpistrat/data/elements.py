"""Elements of a data set: examples read and mapped, stacked to batches and batches of them."""

from __future__ import annotations

import dataclasses
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests, pytorch
from mpistrat.arrays import host_view, is_array, is_number
from mpistrat.data.numbering import Numbering
from mpistrat.data.order import Block, PassKey, Reader
from mpistrat.data.random import MapScope, PassStream
from mpistrat.data.spec import ArraySpec, fitted
from mpistrat.data.transforms import Enumerate, Map
from mpistrat.errors import DataError

__all__ = ["ElementMaker", "examples_to_read"]

_READ_AHEAD = 256
"""How many examples are read at a time where they are handed out one by one."""


def examples_to_read(items: Block, part: slice, level: int) -> Block:
    """Return the examples that are read for ``items[part]`` of a batch, batched `level` times."""
    read = _items_to_read(items, part, level)
    for _ in range(level - 1):
        read = np.concatenate(read)
    return read


def _items_to_read(items: Block, part: slice, level: int) -> Block:
    # The shape of batches shows only in one of them, also to a rank that gets none.
    items = np.asarray(items)
    mine = items[part]
    return mine if len(mine) or level == 1 else items[:1]


class ElementMaker:
    """Makes the elements of a data set from the items of its order.

    Parameters
    ----------
    reader : Reader
        Of the source.
    maps : sequence of sequences of pairs of Map or Enumerate, and Numbering
        Those of examples, of batches, of batches of batches, and so on, each with the numbers of
        its examples.
    spec_of_level : callable
        Gives the nest of `ArraySpec` of what was batched this many times.
    stream : PassStream
        Random numbers for maps.
    """

    def __init__(
        self,
        reader: Reader,
        maps: Sequence[Sequence[tuple[Map | Enumerate, Numbering]]],
        spec_of_level: Callable[[int], Any],
        stream: PassStream,
    ) -> None:
        self._reader = reader
        numbers = itertools.count()
        self._maps = [
            [(next(numbers) if isinstance(each[0], Map) else 0, *each) for each in level]
            for level in maps
        ]
        self._spec_of_level = spec_of_level
        self._stream = stream

    def enter(self, key: PassKey) -> None:
        """Make elements of the pass `key` from now on."""
        if key != self._stream.key:
            self._stream = dataclasses.replace(self._stream, key=key)

    def examples(self, block: Block) -> Iterator[Any]:
        """Yield the example of each item of `block`."""
        for start in range(0, len(block), _READ_AHEAD):
            part = block[start : start + _READ_AHEAD]
            for number, example in enumerate(_rows(self._reader.read(part))):
                yield self._mapped(0, example, part[number : number + 1])

    def columns(self, items: Block) -> Any:
        """Return the examples `items`, stacked to arrays."""
        if self._maps[0]:
            return _stack(self.examples(items), self._spec_of_level(0))
        return self._reader.read(items)

    def batch(self, items: Block, part: slice, level: int = 1) -> Any:
        """Return ``items[part]`` of a batch, stacked to arrays; only these are read.

        Each item is an example where `level` is 1, else one that was batched `level` - 1 times.
        """
        numbers = getattr(items, "numbers", ())
        items = np.asarray(items)
        mine = items[part]
        if level > 1:
            nest = self._batches(items, part, level)
        elif items.dtype == object and not len(mine) and not self._maps[0]:
            # Items that are examples cost nothing to look at, and know their shapes best.
            nest = nests.map_nest(lambda leaf: leaf[:0], self._reader.read(items[:1]))
        else:
            nest = self.columns(mine)
        return self._mapped(level, nest, mine, numbers)

    def _batches(self, items: Block, part: slice, level: int) -> Any:
        """Return the batches ``items[part]``, stacked."""
        lengths = sorted({len(item) for item in items})
        if len(lengths) > 1:
            raise DataError(
                f"A batch holds batches of {lengths[0]} and of {lengths[-1]} elements, but they "
                "must be equally long. Leave the shorter ones out with batch(..., "
                "drop_remainder=True), in all calls but the last."
            )
        read = _items_to_read(items, part, level)
        if level == 2 and not any(self._maps[:2]):
            nest = self._reader.read(np.concatenate(read))
            nest = nests.map_nest(lambda a: a.reshape(len(read), *lengths, *a.shape[1:]), nest)
        else:
            whole = slice(None)
            batches = (self.batch(each, whole, level - 1) for each in read)
            nest = _stack(batches, self._spec_of_level(level - 1))
        num_mine = len(items[part])
        return nest if num_mine else nests.map_nest(lambda a: a[:0], nest)

    def _mapped(
        self, level: int, element: Any, items: Block, numbers: Sequence[int] = ()
    ) -> Any:
        """Return `element`, made of `items` and batched `level` times, after its maps."""
        for number, each, numbering in self._maps[level]:
            if isinstance(each, Enumerate):
                number, *numbers = numbers or (each.start,)
                element = (np.asarray(number, np.int64), element)
                continue
            make_rng = partial(self._generator, each.seed, number, numbering)
            element = MapScope(make_rng, items, is_batch=level > 0).run(each.fn, element)
            if pytorch.is_loaded():
                element = nests.map_nest(_as_array, element)
        return element

    def _generator(
        self, seed: int, map_number: int, numbering: Numbering, item: Any
    ) -> np.random.Generator:
        number, repetitions = numbering(item)
        return self._stream.generator(seed, map_number, number, repetitions)


def _as_array(leaf: Any) -> Any:
    """Return a tensor, as transformations of images give, as an array."""
    return pytorch.host_array(leaf) if pytorch.is_tensor(leaf) else leaf


def _rows(nest: Any) -> Iterator[Any]:
    leaves, structure = nests.flatten(nest)
    for row in zip(*leaves, strict=True):
        yield nests.unflatten(structure, row)


def _stack(elements: Iterable[Any], spec: Any) -> Any:
    """Return the nest of stacked `elements`, each of them like `spec` except for its shape."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    paths = [path or "the top" for path in paths]
    columns: list[list[np.ndarray]] = [[] for _ in specs]
    for element in elements:
        leaves, other = nests.flatten(element)
        if other != structure:
            raise DataError(
                f"map gave {other} for one element, but {structure} for the first of the data set."
            )
        for path, column, leaf, each in zip(paths, columns, leaves, specs, strict=True):
            column.append(_cast(leaf, each, path))
    return nests.unflatten(structure, map(_stack_leaf, columns, specs, paths))


def _cast(leaf: Any, spec: ArraySpec, path: str) -> np.ndarray:
    is_plain = is_array(leaf) or is_number(leaf) or isinstance(leaf, np.generic)
    if not is_plain or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {path!r}, but arrays and numbers were expected, so that "
            "elements can be stacked to a batch."
        )
    array = host_view(leaf)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map gave {reprlib.repr(array.tolist())} of dtype {array.dtype} at {path!r}, which "
            f"does not fit the dtype {spec.dtype} of the first element of the data set. Let the "
            "function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast


def _stack_leaf(column: list[np.ndarray], spec: ArraySpec, path: str) -> np.ndarray:
    if not column:
        return np.empty((0, *spec._known_shape), spec.dtype)
    shapes = sorted({array.shape for array in column})
    if len(shapes) > 1:
        raise DataError(
            f"map gave arrays of different shapes at {path!r}: {shapes[0]} and {shapes[1]}. The "
            "elements of a batch need one shape."
        )
    return np.stack(column)
