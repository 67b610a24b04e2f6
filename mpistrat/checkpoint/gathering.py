"""Bring the state of a tree of objects to rank 0, one piece at a time."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.format import Header, is_storable
from mpistrat.checkpoint.json_state import split_state
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for, mpi_library
from mpistrat.checkpoint.restoration import check_nothing_waits
from mpistrat.collectives import Collectives
from mpistrat.tracking import Trackable
from mpistrat.variables import MirroredVariable

__all__ = ["Gathering", "Life", "Sink"]


class Life(enum.Enum):
    """Who has the values of a variable, and for how long."""

    BRIEF = enum.auto()
    """Rank 0, until it has been told of the next variable."""
    LONG = enum.auto()
    """Rank 0, until the end of the save."""
    EVERYWHERE = enum.auto()
    """All ranks, the same values, until the end of the save."""


class Sink(Protocol):
    """What takes the state on one rank. It keeps its failures, so that rank 0 stays in step."""

    def add_variable(
        self, path: str, array: Array | None, modes: dict[str, Any], life: Life
    ) -> None:
        """Take the values of a variable, which rank 0 always has and the others may have. Local."""

    def add_state(self, path: str, state: dict[str, Any], arrays: Sequence[str]) -> None:
        """Take JSON state, and the names of the arrays that belong to it. Local."""


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
        self._states: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {}
        with self.ranks.together(what, self.path):
            _check_savable(tree)
            if self.ranks.rank == 0:  # expect_partial() may have been called there alone
                check_nothing_waits(what, root, tree)
            for name, each in tree.stateful.items():
                self._states[name] = split_state(each.state_dict(), name)
        _check_same_on_all_ranks(self.ranks, what, self.path, tree)

    def header(self, step: int) -> Header:
        """Return the attributes of the root group. Local."""
        return Header(
            step=step, num_replicas=self.ranks.size, mpi_library=mpi_library(self.ranks)
        )

    def send_to(self, sink: Sink) -> None:
        """Bring everything to rank 0, one variable at a time. **Collective**."""
        for name, variable in self._tree.variables.items():
            value = variable.save_value()
            modes = {
                "synchronization": variable.synchronization.name,
                "aggregation": variable.aggregation.name,
                "trainable": variable.trainable,
            }
            life = Life.LONG if value is variable.storage else Life.BRIEF
            if isinstance(variable, MirroredVariable):
                life = Life.EVERYWHERE
            sink.add_variable(name, value, modes, life)
            del value  # or the next would come while this one is there
        for name, (state, arrays) in self._states.items():
            sink.add_state(name, state, list(arrays))
            for key, array in arrays.items():
                sink.add_variable(f"{name}/{key}", array, {}, Life.LONG)


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
