"""Data sets that are divided among the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mpistrat import nests, values
from mpistrat.arrays import Device
from mpistrat.data.feeds import Feed
from mpistrat.data.iterators import ElementIterator
from mpistrat.data.position import Position
from mpistrat.data.transfer import transfer_to
from mpistrat.errors import EpochError

if TYPE_CHECKING:
    from mpistrat.collectives import Collectives

__all__ = ["DistributedDataset"]


class DistributedDataset:
    """The batches of a data set, of which each rank gets its part.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. Each element is a nest of `PerReplica`.
    Iterating again starts the next pass; passes are counted from 0, broken-off ones too.

    Where an element cannot be made on one rank, because its part of a file is damaged or a
    function given to `Dataset.map` raises, that rank gets the error and the others an
    `EpochMismatchError` that names it, at their next collective.

    Parameters
    ----------
    feed : Feed
        The elements of this rank.
    device : Device, optional
        Where to place them; ``None`` leaves them in host memory.
    collectives : Collectives
        Through which the other ranks hear of an error.
    """

    def __init__(self, feed: Feed, device: Device | None, collectives: Collectives) -> None:
        self.strategy: Any = None
        """The strategy that divides it, for a checkpoint that saves the position."""
        self._feed = feed
        self._device = device
        self._collectives = collectives
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
        def per_replica_of(leaf: Any) -> Any:
            leaf = transfer.end(leaf)
            return values.PerReplica(leaf) if values.is_value(leaf) else leaf

        with contextlib.closing(transfer_to(self._device)) as transfer:
            elements = self._feed.elements(pass_number, start, transfer.begin)
            with contextlib.closing(elements):
                while True:
                    try:
                        # No name for the element, which would keep it in memory until the next.
                        yield nests.map_nest(per_replica_of, next(elements))
                    except StopIteration:
                        return
                    except EpochError:
                        raise
                    except Exception as error:
                        self._tell(error)
                        raise

    def _tell(self, error: Exception) -> None:
        """Let the other ranks know of an error here: they would wait for this rank. Collective."""
        # What comes of it on this rank is no news beside the error itself.
        with contextlib.suppress(Exception), self._collectives.call("next batch"):
            raise error

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
