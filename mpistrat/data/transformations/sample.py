"""Sampling: weighted draws of elements with replacement, and of datasets that are mixed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.arrays import host_view
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS, Block, Order, Reordering
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.transformations.concatenate import common_spec
from mpistrat.data.views import (
    Child,
    Part,
    View,
    borders_between,
    no_fixed_files,
    position_borders,
    position_layout,
)
from mpistrat.system.text import brief

_DRAWS, _CHOICES = 2**32 - 3, 2**32 - 4
"""Separate these streams from the streams of shuffles and maps with the same seed."""


_MAX_KNOWN = 3
"""Number of passes and repetitions whose draws are kept: a reader looks ahead into the next one."""


def checked_weights(what: str, weights: Any) -> np.ndarray:
    """Return `weights` as a new array of float64, none negative and their sum positive."""
    array = np.array(host_view(weights), np.float64)
    if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any() or not array.sum() > 0:
        raise ValueError(
            f"{what} needs weights in one dimension that are finite and not negative, with a "
            f"positive sum, not {brief(weights)}."
        )
    return array


def _uniform(seed: int, key: tuple[int, ...], count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1)."""
    # NumPy promises only for raw bits that they do not change between versions.
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)
    # The upper 53 bits, as many as a float64 holds: multiples of 2**-53, each equally likely.
    uniform: np.ndarray = (bits >> np.uint64(11)) * 2.0**-53
    return uniform


def _choose(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Return indices of `weights`, drawn with probabilities proportional to the weights."""
    sums = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])  # rounding may lead past the end
    found = np.searchsorted(sums, uniform * sums[-1], "right")
    chosen: np.ndarray = np.minimum(found, last)
    return chosen


class Weights:
    """Draws of elements by weight: a function of seed and pass."""

    def __init__(self, weights: Any, num_examples: int | None, seed: int) -> None:
        self._weights = checked_weights("sample", weights)
        self.num_drawn = len(self._weights) if num_examples is None else num_examples
        self._seed = seed
        self._known: dict[PassKey, np.ndarray] = {}

    def __repr__(self) -> str:
        # A digest, because ranks compare this string and there may be millions of weights.
        digest = hashlib.sha256(self._weights.tobytes()).hexdigest()[:16]
        return f"weights {digest}, {self.num_drawn} draws, seed={self._seed}"

    def check(self, length: int) -> None:
        """Raise ValueError unless there is a weight for each of `length` elements."""
        if len(self._weights) != length:
            raise ValueError(
                f"sample: there are {len(self._weights)} weights, but the dataset has {length} "
                "elements. Pass one per element."
            )

    def draws(self, key: PassKey) -> np.ndarray:
        """Return the positions of the elements of the pass `key`."""
        found = self._known.get(key)
        if found is None:
            while len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            uniform = _uniform(self._seed, (_DRAWS, *key), self.num_drawn)
            found = self._known[key] = _choose(self._weights, uniform)
        return found


class Sampled(View):
    """Elements of a dataset, drawn with replacement in each pass."""

    name = "sample"

    def __init__(self, child: Pipeline, weights: Weights) -> None:
        super().__init__([child])
        self.is_steady = False
        self._weights = weights
        if child.source.is_read:
            weights.check(child.known_length)

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.sample({self._weights.num_drawn} of them)"

    @property
    def described(self) -> str:
        """Weights, number of draws and seed."""
        return f"sample by {self._weights!r}"

    @property
    def num_examples(self) -> int:
        """The number of draws."""
        self._weights.check(self.children[0].known_length)
        return self._weights.num_drawn

    @property
    def file_starts(self) -> np.ndarray:
        """Empty; raises ValueError if there are several files."""
        borders = position_borders(self.children[0])
        if len(borders):
            raise no_fixed_files(repr(self))
        return borders

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the elements that are drawn."""
        layout = position_layout(self.children[0], key)
        return None if layout is None else layout.of_numbers(self._weights.draws(key))

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements that are drawn."""
        return [Part(0, children[0].at(self._weights.draws(key)[numbers], key))]


@dataclass(frozen=True)
class SampleBatches(Reordering):
    """Batches of the pass, drawn with replacement."""

    weights: Weights

    @property
    def depends_on_pass(self) -> bool:
        """True: each pass has its own draws."""
        return True

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        return self.weights.num_drawn

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        self.weights.check(upstream.length)
        yield upstream.at(self.weights.draws(key)[start:], key, {})


_NOTHING = object()

_BLOCK = 2**14
"""Number of choices between datasets that are drawn at a time."""


@dataclass(frozen=True)
class _Choices:
    """Some of the choices between datasets, and the position in each dataset before them."""

    first: int
    """Number of elements before these choices."""
    counts: np.ndarray
    """Number of elements before these choices, per dataset."""
    owners: np.ndarray
    """The dataset of each choice."""
    numbers: np.ndarray
    """The position of each chosen element in its dataset."""


class Mixed(View):
    """Elements of several datasets, each chosen by weight."""

    # The choices depend only on the seed, so that the length is the same in each pass.

    name = "sample_from_datasets"
    needs_one_spec = True

    def __init__(
        self, children: Sequence[Pipeline], weights: np.ndarray, seed: int, stop_on_empty: bool
    ) -> None:
        super().__init__(children)
        self._weights, self._seed, self._stops = weights, seed, stop_on_empty
        self._choices: list[_Choices] = []
        self._left = weights.copy()
        self._num_draws = 0
        self._has_ended = False

    @property
    def described(self) -> str:
        """Weights, seed, and whether the mixture stops at the first empty dataset."""
        weights = self._weights.tolist()
        return f"{self.name} with {weights=}, seed={self._seed}, stop_on_empty={self._stops}"

    @cached_property
    def element_spec(self) -> Any:
        """The common spec."""
        return common_spec(self.name, self.children)

    @cached_property
    def _lengths(self) -> np.ndarray:
        lengths = [child.known_length for child in self.children]
        # Greater than any position, so endless datasets need no special case in comparisons below.
        return np.array([2**62 if length == ENDLESS else length for length in lengths])

    @cached_property
    def num_examples(self) -> int:
        """How many elements come before the end, or `ENDLESS`."""
        is_endless, is_drawn = self._lengths == 2**62, self._weights > 0
        never_ends = np.any if not self._stops else np.all
        if never_ends(is_endless[is_drawn]):
            return ENDLESS
        while self._draw():
            pass
        return self._end

    @property
    def _end(self) -> int:
        latest = self._choices[-1] if self._choices else None
        return latest.first + len(latest.owners) if latest else 0

    def _draw(self) -> bool:
        """Draw some more choices; return whether there were any left."""
        if self._has_ended:
            return False
        counts = np.zeros(len(self._lengths), np.int64)
        if self._choices:
            latest = self._choices[-1]
            counts = latest.counts + np.bincount(latest.owners, minlength=len(counts))
        if not self._stops:
            self._left[counts >= self._lengths] = 0
        if not self._left.any():
            self._has_ended = True
            return False
        uniform = _uniform(self._seed, (_CHOICES, self._num_draws), _BLOCK)
        self._num_draws += 1
        owners = _choose(self._left, uniform)
        numbers = np.empty(len(owners), np.int64)
        for child in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == child)
            numbers[mine] = counts[child] + np.arange(len(mine))
        # Stop at the first choice of an empty dataset: the draws after it need new weights.
        empty = np.flatnonzero(numbers >= self._lengths[owners])
        if len(empty):
            owners, numbers = owners[: empty[0]], numbers[: empty[0]]
            self._has_ended = self._stops
        self._choices.append(_Choices(self._end, counts, owners, numbers))
        return True

    def _chosen(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each example, and the position there."""
        last = int(numbers.max(initial=-1))
        while self._end <= last and self._draw():
            pass
        firsts = np.array([each.first for each in self._choices] or [0])
        which = np.searchsorted(firsts, numbers, "right") - 1
        owners, positions = np.empty((2, len(numbers)), np.int64)
        for each in np.unique(which).tolist():
            mine = which == each
            choices, within = self._choices[each], numbers[mine] - firsts[each]
            owners[mine], positions[mine] = choices.owners[within], choices.numbers[within]
        return owners, positions

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the elements of the datasets that are chosen."""
        left = self._weights.copy()
        for number in itertools.count():
            if not left.any():
                return
            # These are the numbers that `_draw` takes, with a new block when a dataset ends. So a
            # stream has the same order as the same elements in files.
            for owner in _choose(left, _uniform(self._seed, (_CHOICES, number), _BLOCK)).tolist():
                element = next(elements[owner], _NOTHING)
                if element is not _NOTHING:
                    yield element
                    continue
                if self._stops:
                    return
                left[owner] = 0
                break

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which the dataset or file changes."""
        if not self.is_of_files:
            return np.empty(0, np.int64)
        owners, positions = self._chosen(np.arange(self.num_examples))
        files = np.zeros(len(owners), np.int64)
        first = 0
        for number, child in enumerate(self.children):
            borders, mine = position_borders(child), owners == number
            files[mine] = first + np.searchsorted(borders, positions[mine], "right")
            first += len(borders) + 1
        return borders_between(files)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of all datasets."""
        layouts = [position_layout(child, key) for child in self.children]
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(layouts):
            return None
        firsts = np.cumsum([0, *(child.known_length for child in self.children)])
        owners, positions = self._chosen(np.arange(self.num_examples))
        return ChunkLayout.joined(known).of_numbers(firsts[owners] + positions)

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements of the datasets that are chosen."""
        owners, positions = self._chosen(numbers)
        present = np.unique(owners).tolist() or [0]
        if len(present) == 1:
            return [Part(present[0], children[present[0]].at(positions, key))]
        parts = []
        for owner in present:
            places = np.flatnonzero(owners == owner)
            parts.append(Part(owner, children[owner].at(positions[places], key), places))
        return parts
