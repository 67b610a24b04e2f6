"""Data sets that are divided among the ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mpistrat import nests, values
from mpistrat.arrays import Device, is_array, is_number, place
from mpistrat.data.feeds import Feed
from mpistrat.data.iterators import ElementIterator
from mpistrat.data.position import Position

__all__ = ["DistributedDataset"]


class DistributedDataset:
    """The batches of a data set, of which each rank gets its part.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. Each element is a nest of `PerReplica`.
    Iterating again starts the next pass; passes are counted from 0, broken-off ones too.

    Parameters
    ----------
    feed : Feed
        The elements of this rank.
    device : Device, optional
        Where to place them; ``None`` leaves them in host memory.
    """

    def __init__(self, feed: Feed, device: Device | None) -> None:
        self.strategy: Any = None
        """The strategy that divides it, for a checkpoint that saves the position."""
        self._feed = feed
        self._device = device
        self._position = Position()

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one rank's element, batch dimension ``None``. Local."""
        return self._feed.element_spec

    def cardinality(self) -> int:
        """Return the number of elements of a pass; -1 for endless, -2 for unknown. Local."""
        return self._feed.length

    def __iter__(self) -> ElementIterator:
        pass_number, start, on_step = self._position.begin()
        return ElementIterator(self._placed(pass_number, start), on_step)

    def _placed(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        for element in self._feed.elements(pass_number, start):
            yield values.per_replica(nests.map_nest(self._place, element))

    def _place(self, leaf: Any) -> Any:
        if self._device is None or not (is_array(leaf) or is_number(leaf)):
            return leaf
        return place(leaf, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the pass, and how many of its batches were handed out. Local.

        JSON values only, the same on all ranks. ``order`` stands for what decides the order of
        examples.
        """
        return self._position.state(self._feed.layout)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position: the next ``iter()`` goes on in that pass. Local.

        Parameters
        ----------
        state : dict
            From `state_dict`, of a data set with the same files, order and batch size. The
            number of ranks may be another where batches are global.

        Raises
        ------
        TypeError, ValueError
            If it is no such dict, or a position within a pass that this data set does not have.
        """
        self._position.load(state, self._feed.layout, self._feed.length)
