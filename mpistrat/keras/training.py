"""One model that all ranks train: seeds that differ between ranks, and averages over them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mpistrat.keras.ranks import (
    check_replicated,
    check_same_batches,
    gather,
    rank_and_size,
    sums_of,
)

_MASK = 2**64 - 1


def mixed(*numbers: int) -> int:
    """Return an integer of 64 bits, each of which depends on all bits of `numbers`. Local."""
    # The finalizer of SplitMix64. Sums of seeds and ranks would not do: Keras itself draws with
    # `seed + counter`, so the ranks would draw each other's numbers a step later.
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of a seed variable on `rank`, from rank 0's, as an int32. Local."""
    if rank == 0:
        return seed  # so that doing it twice changes nothing
    bits = mixed(seed, rank) & 0xFFFFFFFF
    return bits - 2**32 if bits >= 2**31 else bits


class Training:
    """The training of one model on all ranks.

    Several callbacks may drive it: each step and each beginning counts once.

    Attributes
    ----------
    seed : int
        Rank 0's seed of PyTorch's generator at the start of the training.
    step : int
        Number of steps that have ended.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.step = 0
        self._root_seeds: list[int] = []
        """Rank 0's seed of each seed variable."""
        self._params: Any = None
        """The parameters that Keras passes to all callbacks of one `fit`."""
        self._generator: torch.Tensor | None = None
        """The state of PyTorch's generator from before the step that is running."""
        self._first_batch = 0
        self._is_averaged = False

    def begin_fit(self, model: Any, params: Any) -> None:
        """Compare the ranks, and make their seeds differ, once for each `fit`. **Collective**."""
        if params is self._params:
            return
        check_replicated()
        own = params.get("steps"), torch.initial_seed(), self._values_of_seeds(model)
        of_ranks = gather(own)
        check_same_batches([each[0] for each in of_ranks])
        self._params, self._generator = params, None
        _, seed, seeds = of_ranks[0]
        if self.seed is None:
            self.seed = seed
        self.set_seeds(model, seeds)

    def is_of_fit(self, params: Any) -> bool:
        """Return whether these are the parameters of the last `fit`. Local."""
        return params is self._params

    def begin_step(self, batch: int) -> None:
        """Seed PyTorch's generator with a number of this rank and this step. Local."""
        if self._generator is not None:
            return
        rank, _ = rank_and_size()
        self._generator, self._first_batch = torch.get_rng_state(), batch
        torch.manual_seed(mixed(self.seed or 0, rank, self.step))
        self._is_averaged = False

    def end_step(self, batch: int) -> None:
        """Count the step, or the steps of one execution. Local."""
        if self._generator is None:
            return
        # Between steps the generator is the program's own: loaders that shuffle use it, and may
        # rely on equal numbers on all ranks.
        torch.set_rng_state(self._generator)
        self._generator = None
        self.step += batch - self._first_batch + 1

    def average(self, model: Any, again: bool = True) -> None:
        """Set the moving statistics to their means over the ranks. **Collective**.

        With ``again=False`` only if a step has run since the last time.
        """
        if self._is_averaged and not again:
            return
        self._is_averaged = True
        _, size = rank_and_size()
        variables = _statistics_of(model)
        if size == 1 or not variables:
            return
        # In float64, the mean of equal numbers is exactly that number.
        sums = sums_of([each.value for each in variables])
        for variable, total in zip(variables, sums, strict=True):
            variable.assign((total / size).to(variable.value.dtype))

    def seeds(self, model: Any) -> list[list[int]]:
        """Return rank 0's value of each seed variable, on every rank. Local."""
        counters = [counter for _, counter in self._values_of_seeds(model)]
        return [list(pair) for pair in zip(self._root_seeds, counters, strict=True)]

    def set_seeds(self, model: Any, of_root: list[list[int]]) -> None:
        """Set each seed variable to this rank's value, from the values of rank 0. Local."""
        rank, _ = rank_and_size()
        self._root_seeds = [seed for seed, _ in of_root]
        for variable, (seed, counter) in zip(_seeds_of(model), of_root, strict=True):
            variable.assign([seed_of_rank(seed, rank), counter])

    def _values_of_seeds(self, model: Any) -> list[list[int]]:
        return [each.value.tolist() for each in _seeds_of(model)]


def _seeds_of(model: Any) -> list[Any]:
    """Return the seed variables of a model, such as Dropout's, each once."""
    generators = (each for layer in model._flatten_layers() for each in layer._seed_generators)
    return list({id(each.state): each.state for each in generators}.values())


def _statistics_of(model: Any) -> list[Any]:
    """Return the floating variables that training changes without gradients, each once."""
    # Frozen weights were created as trainable: the ranks hold the same values of these.
    variables = (
        each for layer in model._flatten_layers() for each in layer._non_trainable_variables
    )
    floating = {id(each): each for each in variables if each.value.is_floating_point()}
    return list(floating.values())


_trainings: weakref.WeakKeyDictionary[Any, Training] = weakref.WeakKeyDictionary()


def training_of(model: Any) -> Training:
    """Return the training of a model, the same for all callbacks. Local."""
    return _trainings.setdefault(model, Training())
