"""Random numbers for functions passed to `Dataset.map`, with one stream per example.

A stream is a pure function of the seed, the pass, the number of the example and the number of the
map. So neither the number of ranks, nor threads, nor a shuffle, nor a restart changes the random
numbers of an example.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.errors import ContextError

_MAP_NUMBERS = 2**32 - 1
"""Separates these streams from the streams of a shuffle with the same seed."""


PassKey = tuple[int, ...]
"""The number of the pass, then of each repetition within it."""


@dataclass(frozen=True)
class PassStream:
    """The random streams of one iteration."""

    key: PassKey = (0,)
    branch: int = 0
    """The rank, if each rank has different examples; 0 if all share one order."""
    first_map: int = 0
    """How many maps of the dataset are numbered before the maps of this part."""
    repeats: tuple[int | None, ...] = ()
    """How often the items are repeated, innermost repetition first; ``None`` for endlessly."""
    is_fixed: bool = False
    """Whether the results are used in every pass, so that nothing may be random."""

    def generator(
        self, seed: int, map_number: int, number: int, repetitions: PassKey = ()
    ) -> np.random.Generator:
        """Return the generator for one example in one map."""
        if self.is_fixed:
            raise ValueError(
                "A filter is evaluated once for all epochs, but a map before it uses random "
                "numbers (example_rng), which differ in each epoch. Call filter before that map."
            )
        which = (self.key[0], self.branch, number, self.first_map + map_number)
        key = (_MAP_NUMBERS, *which, *self.key[1:], *repetitions)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))

    def repetitions(self, count: int) -> PassKey:
        """Return the repetition numbers, to append to `key`, after `count` repetitions in all."""
        numbers = []
        for limit in self.repeats:
            count, number = (0, count) if limit is None else divmod(count, limit)
            numbers.append(number)
        return tuple(reversed(numbers))


class MapScope:
    """One call of a function passed to `map`, which may ask for random numbers."""

    __slots__ = ("_items", "_make_rng", "_rngs", "is_batch")

    def __init__(
        self,
        make_rng: Callable[[Any], np.random.Generator],
        items: Iterable[Any],
        is_batch: bool,
    ) -> None:
        self._make_rng = make_rng
        self._items = items
        self._rngs: tuple[np.random.Generator, ...] | None = None
        self.is_batch = is_batch

    @property
    def rngs(self) -> tuple[np.random.Generator, ...]:
        """One generator per example, created on first use, because most functions need none."""
        if self._rngs is None:
            self._rngs = tuple(map(self._make_rng, self._items))
        return self._rngs

    def run(self, fn: Callable[..., Any], element: Any) -> Any:
        """Return ``fn(element)``, with the items of a tuple as several arguments."""
        # `fn` may iterate over another dataset, whose maps have their own scope.
        outer, _current.scope = _current.scope, self
        try:
            return fn(*element) if isinstance(element, tuple) else fn(element)
        finally:
            _current.scope = outer


class _Current(threading.local):
    """The scope that each thread is in."""

    scope: MapScope | None = None


_current = _Current()


def example_rng() -> np.random.Generator:
    """Return the random generator of the example that `Dataset.map` is calling a function with.

    Local. For functions that are applied before `batch`. Repeated calls within one call of the
    function return the same generator, which continues its sequence.

    Returns
    -------
    numpy.random.Generator
        It depends only on the seed passed to `Dataset.map`, the epoch (and the repetition, after
        `repeat`), the number of the map, and the number of the example. It does not depend on the
        number of ranks, on threads, or on whether the epoch was resumed; with
        `Strategy.distribute_datasets_from_function` and the policy FILE it also depends on the
        number of the replica. The number of an example
        is its position in the dataset that `map` was applied to, before shuffling. `take`, `skip`
        and `shard` after a shuffle do not change it either.

    Raises
    ------
    ContextError
        Outside of a function that `Dataset.map` calls, and in a function that gets batches.

    Examples
    --------
    >>> def add_noise(x):
    ...     return x + ms.data.example_rng().normal()
    >>> noisy = ms.data.Dataset.range(8).map(add_noise, seed=7).batch(4)
    """
    scope = _scope("example_rng")
    if scope.is_batch:
        raise ContextError(
            "example_rng() was called by a function that gets a slice of a batch. Use "
            "example_rngs(), which has a generator for each of its examples, or map before batch."
        )
    (rng,) = scope.rngs
    return rng


def example_rngs() -> tuple[np.random.Generator, ...]:
    """Return the random generators of the examples that `Dataset.map` is calling a function with.

    Local. For functions that are applied after `batch`; before `batch` there is one example.

    Returns
    -------
    tuple of numpy.random.Generator
        One generator per example in the slice of the batch, as described in `example_rng`.

    Raises
    ------
    ContextError
        Outside of a function that `Dataset.map` calls.

    Examples
    --------
    >>> def add_noise(batch):
    ...     return batch + np.array([rng.normal() for rng in ms.data.example_rngs()])
    >>> noisy = ms.data.Dataset.range(8).batch(4).map(add_noise, seed=7)
    """
    return _scope("example_rngs").rngs


def _scope(name: str) -> MapScope:
    scope = _current.scope
    if scope is None:
        raise ContextError(
            f"{name}() gives random numbers to a function that Dataset.map calls, in the thread "
            "that calls it. Elsewhere use numpy.random.default_rng(seed)."
        )
    return scope


def replica_rng(key: Sequence[int], replica_id: int) -> np.random.Generator:
    """Return the generator of `ReplicaContext.rng`."""
    if not key:
        raise ValueError("rng needs at least one integer, such as a seed and a step.")
    entropy = [as_integer("A part of the key of rng", part) for part in key]
    if min(entropy) < 0:
        raise ValueError(f"rng needs integers that are not negative, not {tuple(key)}.")
    # The first number separates these streams from the streams of shuffles, maps and samples.
    sequence = np.random.SeedSequence(entropy, spawn_key=(2**32 - 2, replica_id))
    return np.random.Generator(np.random.PCG64(sequence))
