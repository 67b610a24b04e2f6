"""Arrays that are split along one axis, and their blocks in the flat order of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpistrat.arrays import Array
from mpistrat.sharding import cut, part_lengths


@dataclass(frozen=True)
class Slab:
    """A contiguous block of the flat whole: index ranges before the axis and along it."""

    before: slice
    along: slice


@dataclass(frozen=True)
class AxisSplit:
    """An array in parts along one axis. The first parts may be longer by one element."""

    shape: tuple[int, ...]
    """Shape of the whole."""
    axis: int
    num_parts: int
    index: int
    """Number of this rank's part."""

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Range of each part along the axis."""
        stops = np.cumsum(part_lengths(self.shape[self.axis], self.num_parts)).tolist()
        return tuple(range(*pair) for pair in zip([0, *stops], stops, strict=False))

    @property
    def own(self) -> range:
        """Range of this rank's part along the axis."""
        return self.parts[self.index]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return (*self.shape[: self.axis], len(self.own), *self.shape[self.axis + 1 :])

    @property
    def own_offset(self) -> tuple[int, ...]:
        """Start of this rank's part in the whole, for each axis."""
        return tuple(self.own.start if i == self.axis else 0 for i in range(len(self.shape)))

    @property
    def _num_before(self) -> int:
        return math.prod(self.shape[: self.axis])

    @property
    def _num_behind(self) -> int:
        """Number of elements per index along the axis."""
        return math.prod(self.shape[self.axis + 1 :])

    def cut_own(self, whole: Array) -> Array:
        """Return a view of this rank's part of the whole."""
        own: Array = whole[(slice(None),) * self.axis + (slice(self.own.start, self.own.stop),)]
        return own

    def fill(self, own: Array, start: int, piece: Array) -> None:
        """Copy into `own` its elements of `piece`, which begins at `start` of the flat whole."""
        target = own.reshape(self._num_before, len(self.own), self._num_behind)
        length = self.shape[self.axis] * self._num_behind
        if not piece.size or not length:
            return
        # "Place" means an index before the axis. A piece may begin and end in the middle of a
        # place: first fill the rest of that place, then all whole places, then part of one more.
        place, inside = divmod(start, length)
        if inside:
            head = min(length - inside, piece.size)
            self._fill_one(target[place], inside, piece[:head])
            place, piece = place + 1, piece[head:]
        num_whole = piece.size // length
        shape = (num_whole, self.shape[self.axis], self._num_behind)
        blocks = piece[: num_whole * length].reshape(shape)
        target[place : place + num_whole] = blocks[:, self.own.start : self.own.stop]
        rest = piece[num_whole * length :]
        if rest.size:
            self._fill_one(target[place + num_whole], 0, rest)

    def _fill_one(self, target: Array, inside: int, piece: Array) -> None:
        """Fill the part of one place before the axis, from its element `inside`."""
        begin, stop = self.own.start * self._num_behind, self.own.stop * self._num_behind
        first, last = max(inside, begin), min(inside + piece.size, stop)
        if first < last:
            flat = target.reshape(-1)
            flat[first - begin : last - begin] = piece[first - inside : last - inside]

    def slabs(self, num_elements: int) -> Iterator[Slab]:
        """Yield the whole in its flat order, at most about `num_elements` at a time."""
        length = self.shape[self.axis]
        size = length * self._num_behind
        # A slab consists of whole places before the axis, or is part of one. Otherwise it would not
        # be contiguous in the flat whole, and could not be appended to a file.
        if 0 < size <= num_elements:
            for places in cut(self._num_before, num_elements // size):
                yield Slab(places, slice(0, length))
            return
        step = max(1, num_elements // max(self._num_behind, 1))
        for place in range(self._num_before if size else 0):
            for along in cut(length, step):
                yield Slab(slice(place, place + 1), along)

    def own_of(self, slab: Slab, own: Array) -> Array:
        """Return the elements of a slab that are in the `own` part, flat."""
        start, stop = self._clipped(slab, self.own)
        blocks = own.reshape(self._num_before, len(self.own), self._num_behind)
        mine: Array = blocks[slab.before, start - self.own.start : stop - self.own.start]
        return mine.reshape(-1)

    def counts(self, slab: Slab) -> list[int]:
        """Return the number of elements of a slab in each part."""
        places = slab.before.stop - slab.before.start
        spans = (self._clipped(slab, part) for part in self.parts)
        return [places * (stop - start) * self._num_behind for start, stop in spans]

    def join(self, slab: Slab, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return a flat slab, joined from the elements in all parts."""
        places = slab.before.stop - slab.before.start
        # For each place before the axis, the whole contains the parts one after the other. So they
        # are joined per place and not end to end.
        return np.concatenate(
            [part.reshape(places, part.size // places) for part in parts], axis=1
        ).reshape(-1)

    def _clipped(self, slab: Slab, part: range) -> tuple[int, int]:
        """Return the indices along the axis that a slab and a part have in common."""
        # A part outside the slab gets an empty range within its bounds, so counts are 0 and never
        # negative.
        start = min(max(slab.along.start, part.start), part.stop)
        return start, max(start, min(slab.along.stop, part.stop))
