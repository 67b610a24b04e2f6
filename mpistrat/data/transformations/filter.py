"""Filter of elements by a function, which the ranks evaluate together, once for all passes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import sharding
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.fingerprint import check_same
from mpistrat.data.order import Block, function_name
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.views import (
    Child,
    Part,
    View,
    borders_between,
    position_borders,
    position_layout,
    unshuffled_rows,
    without_shuffles,
)
from mpistrat.options import AutoShardPolicy

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives


class Filtered(View):
    """The elements for which a function is true."""

    # Shuffles before the filter change only the order of the kept elements.

    name = "filter"
    is_fixed = True

    def __init__(self, child: Pipeline, fn: Callable[..., Any], fields: Any) -> None:
        super().__init__([child])
        self._fn, self._fields = fn, fields
        self._settle_order(child)
        self._mask: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.filter({function_name(self._fn)})"

    @property
    def kind(self) -> str:
        """The name of the method, with the function and the kind of the dataset."""
        return f"{self.children[0].kind}.filter({function_name(self._fn)})"

    @property
    def described(self) -> str:
        """A description with a digest of the numbers of the elements that are kept."""
        digest = hashlib.sha256(np.packbits(self.mask).tobytes()).hexdigest()[:16]
        return f"filter that keeps {self.num_examples} of {len(self.mask)} elements, {digest}"

    @property
    def is_read(self) -> bool:
        """Whether it is known which elements are kept."""
        return self._mask is not None and super().is_read

    @property
    def num_examples(self) -> int:
        """Number of elements that are kept."""
        return len(self._kept)

    @property
    def mask(self) -> np.ndarray:
        """Whether each element is kept; evaluates the filter on this rank if necessary."""
        if self._mask is None:
            self.take_mask(self.evaluate(1, 0))
            self.report([self.notes])
        assert self._mask is not None
        return self._mask

    @property
    def notes(self) -> Any:
        """The notes about the evaluation on this rank that `report` needs, as JSON values."""
        return None

    def report(self, notes: Iterable[Any]) -> None:
        """Report the evaluation, with the notes of all ranks."""

    def take_mask(self, mask: np.ndarray) -> None:
        """Use `mask`, which the ranks have evaluated together."""
        self._mask = mask
        self._layouts.clear()
        vars(self).pop("_kept", None)

    @cached_property
    def _kept(self) -> np.ndarray:
        return np.flatnonzero(self.mask)

    def evaluate(self, size: int, rank: int) -> np.ndarray:
        """Return for each element in the share of `rank` whether it is kept."""
        pipeline, fields = self._unshuffled, self._fields
        fewer = None if fields is None else pipeline.only(_as_tuple(fields))
        part = sharding.slice_of_rank(pipeline.known_length, size, rank)
        kept = np.empty(part.stop - part.start, np.bool_)
        with closing((fewer or pipeline).fixed_elements(part.start)) as elements:
            for place in range(len(kept)):
                element = next(elements)
                if fewer is None:
                    element = self._seen(element)
                kept[place] = self._is_kept(element, part.start + place)
        return kept

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the elements for which the function is true."""
        for number, element in enumerate(elements[0]):
            if self._is_kept(self._seen(element), number):
                yield element

    def _seen(self, element: Any) -> Any:
        """Return the part of `element` that is passed to the function."""
        if self._fields is None:
            return element
        return tuple(_field(element, each) for each in _as_tuple(self._fields))

    @property
    def _unshuffled(self) -> Pipeline:
        """The dataset in the order of its numbers, if these mean the same in each pass."""
        child = self.children[0]
        if not self.is_steady:
            raise ValueError(
                f"{self.name} is evaluated once for all epochs, but {child.calls} has different "
                f"elements in each epoch. Call {self.name} before sample, and before take, skip, "
                "shard or zip of shuffled data."
            )
        return without_shuffles(child)

    def _is_kept(self, element: Any, number: int) -> bool:
        result = self._fn(*element) if isinstance(element, tuple) else self._fn(element)
        if np.ndim(result):
            raise ValueError(
                f"filter needs one truth value of each element, but the function gave an array of "
                f"shape {np.shape(result)} for element {number}. Use .all() or .any()."
            )
        return bool(result)

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which the file changes."""
        borders = position_borders(self._unshuffled)
        return borders_between(np.searchsorted(borders, self._kept, "right"))

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the elements that are kept."""
        layout = position_layout(self._unshuffled, key)
        return None if layout is None else layout.of_numbers(self._kept)

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the pass `key` from position `start` on."""
        if self.is_in_order:
            yield from super().blocks(key, batch_size, start)
            return
        rows = unshuffled_rows(self.children[0])
        assert rows is not None
        new_numbers = np.cumsum(self.mask) - 1
        for items in self.children[0].order.blocks(key, batch_size):
            old = (items - rows.start) // rows.step
            kept = new_numbers[old[self.mask[old]]]
            if start < len(kept):
                yield kept[start:]
            start = max(start - len(kept), 0)

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements that are kept."""
        rows, kept = unshuffled_rows(self.children[0]), self._kept[numbers]
        items = children[0].at(kept, key) if rows is None else rows.start + rows.step * kept
        return [Part(0, items)]


def _as_tuple(fields: Any) -> tuple[Any, ...]:
    return tuple(fields) if isinstance(fields, tuple | list) else (fields,)


def _field(element: Any, field: Any) -> Any:
    try:
        return element[field]
    except (KeyError, IndexError, TypeError):
        known = list(element) if isinstance(element, dict) else f"{type(element).__name__}"
        raise ValueError(
            f"filter: the elements have no field {field!r}, only {known}. Pass keys of a dict, or "
            "positions in a tuple."
        ) from None


def evaluate_filter(
    source: Filtered, policy: AutoShardPolicy, collectives: Collectives, kind: str
) -> None:
    """Find the elements that a filter keeps; each rank evaluates a share. **Collective**."""
    check_same(source.children[0], policy, collectives, kind)
    if all(collectives.gather_json(source.is_read, kind)):
        return
    with collectives.all_or_none(kind):
        own = source.evaluate(collectives.size, collectives.rank)
    with collectives.call(kind) as call:
        (mask,) = AllGather(0).forward(call, [own.astype(np.uint8)])
    source.take_mask(np.asarray(mask).astype(np.bool_))
    notes = collectives.gather_json(source.notes, kind)
    if collectives.rank == 0:
        source.report(notes)
