"""Bring the state of a tree of objects to rank 0, one piece at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpistrat.checkpoint.format import Header, is_storable
from mpistrat.checkpoint.json_state import split_state
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for, mpi_library
from mpistrat.checkpoint.restoration import check_nothing_waits
from mpistrat.checkpoint.writer import Item, Life, state_item, variable_item
from mpistrat.collectives import Collectives
from mpistrat.tracking import Trackable
from mpistrat.variables import MirroredVariable, Variable

__all__ = ["Gathering"]


class Gathering:
    """The state of the objects below `root`, checked and on its way to rank 0.

    Making one is **Collective**: all ranks prove that they have the same objects, and that these
    can be saved.

    Parameters
    ----------
    root : Trackable
    what : str
        The public function, for messages.
    path : path
        The file that is to be written, equal on all ranks.
    parallel : bool
        Whether all ranks write, equal on all ranks.

    Attributes
    ----------
    ranks : Collectives
    path : str

    Raises
    ------
    CheckpointError, TypeError, ValueError
        On every rank, if objects cannot be saved, differ over ranks, or lack restored values.
    """

    def __init__(
        self, root: Trackable, what: str, path: str | os.PathLike[str], parallel: bool = False
    ) -> None:
        self._tree = tree = walk(root.checkpoint_children())
        self.ranks: Collectives = collectives_for(tree, what)
        self.path = agree_on_path(self.ranks, what, path, parallel=parallel)
        self._states: list[Item] = []
        with self.ranks.together(what, self.path):
            _check_savable(tree)
            if self.ranks.rank == 0:  # expect_partial() may have been called there alone
                check_nothing_waits(what, root, tree)
            for name, each in tree.stateful.items():
                self._states += _items_of_state(name, each.state_dict())
        _check_same_on_all_ranks(self.ranks, what, self.path, tree)

    def header(self, step: int) -> Header:
        """Return the attributes of the root group. Local."""
        return Header(
            step=step, num_replicas=self.ranks.size, mpi_library=mpi_library(self.ranks)
        )

    def items(self) -> Iterator[Item]:
        """Yield all that goes into the file, in step on all ranks. **Collective**.

        One variable at a time comes to rank 0, so drop each item before the next one.
        """
        for name, variable in self._tree.variables.items():
            yield _item_of(name, variable)
        yield from self._states


def _item_of(name: str, variable: Variable) -> Item:
    """Bring the values of one variable to rank 0. **Collective**."""
    value = variable.save_value()
    life = Life.LONG if value is variable.storage else Life.BRIEF
    if isinstance(variable, MirroredVariable):
        life = Life.EVERYWHERE
    return variable_item(
        name,
        value,
        synchronization=variable.synchronization.name,
        aggregation=variable.aggregation.name,
        trainable=variable.trainable,
        life=life,
    )


def _items_of_state(name: str, given: object) -> Iterator[Item]:
    state, arrays = split_state(given, name)
    yield state_item(name, state, list(arrays))
    for key, array in arrays.items():
        yield variable_item(f"{name}/{key}", array)


def _check_savable(tree: Tree) -> None:
    if tree.empty:
        raise TypeError(
            f"A checkpoint found nothing to save in {', '.join(map(repr, tree.empty))}: such "
            "objects need variables among their attributes, or state_dict() and "
            "load_state_dict()."
        )
    for name, variable in tree.variables.items():
        if not is_storable(variable.dtype):
            raise TypeError(
                f"A checkpoint cannot save the variable {name!r}: HDF5 has no type for its dtype "
                f"{variable.dtype}. Keep a float32 variable beside it, and save that."
            )


def _check_same_on_all_ranks(ranks: Collectives, what: str, path: str, tree: Tree) -> None:
    own = tree.paths()
    first = ranks.broadcast_json(own)
    with ranks.together(what, path):
        if own != first:
            differing = sorted(set(own) ^ set(first)) or "only in their order"
            raise ValueError(
                f"{what}: the objects on rank {ranks.rank} of {ranks.size} differ from those on "
                f"rank 0: {differing}. Every rank must save the same objects in the same order."
            )
