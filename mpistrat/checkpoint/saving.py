"""Save a tree of objects: all ranks bring their values, rank 0 writes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.checkpoint.format import Header, is_storable
from mpistrat.checkpoint.json_state import split_state
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for, mpi_library
from mpistrat.checkpoint.writer import CheckpointWriter, create_checkpoint
from mpistrat.collectives import Collectives
from mpistrat.spans import spanned

__all__ = ["save"]

_WHAT = "Checkpoint.write"
_logger = logging.getLogger("mpistrat")


@spanned("checkpoint", _WHAT)
def save(objects: Mapping[str, object], path: str | os.PathLike[str], step: int = -1) -> str:
    """Write the state of `objects` to `path`, and return it as a string. **Collective**.

    Variables travel one at a time. Where rank 0 fails to write, it still takes part for the
    rest, and the error is raised on every rank at the end.
    """
    began_s = time.perf_counter()
    tree = walk(objects)
    ranks = collectives_for(tree, _WHAT)
    target = agree_on_path(ranks, _WHAT, path)
    with ranks.together(_WHAT, target):
        _check_savable(tree)
        states = {p: split_state(each.state_dict(), p) for p, each in tree.stateful.items()}
    _check_same_on_all_ranks(ranks, target, tree)
    header = Header(step=step, num_replicas=ranks.size, mpi_library=mpi_library(ranks))
    with _file_of_root(ranks, target, header) as file:
        for name, variable in tree.variables.items():
            value = variable.save_value()
            modes = {
                "synchronization": variable.synchronization.name,
                "aggregation": variable.aggregation.name,
                "trainable": variable.trainable,
            }
            file.add_variable(name, value, modes)
        for name, (state, arrays) in states.items():
            file.add_state(name, state, list(arrays))
            for key, array in arrays.items():
                file.add_variable(f"{name}/{key}", array, {})
    if ranks.rank == 0:
        _logger.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - began_s)
    return target


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


def _check_same_on_all_ranks(ranks: Collectives, path: str, tree: Tree) -> None:
    own = tree.paths()
    first = ranks.broadcast_json(own)
    with ranks.together(_WHAT, path):
        if own != first:
            differing = sorted(set(own) ^ set(first)) or "only in their order"
            raise ValueError(
                f"{_WHAT}: the objects on rank {ranks.rank} of {ranks.size} differ from those on "
                f"rank 0: {differing}. Every rank must save the same objects in the same order."
            )


@contextlib.contextmanager
def _file_of_root(ranks: Collectives, path: str, header: Header) -> Iterator[_RootFile]:
    """Give rank 0 the file and the other ranks a stand-in; end with one verdict for all."""
    file = _RootFile(path, header) if ranks.rank == 0 else _NoFile()
    try:
        yield file
    except BaseException as error:
        file.abandon(error)
        raise
    with ranks.together(_WHAT, path):
        file.complete()


class _RootFile:
    """The file on rank 0. A failure is kept until `complete`, so that rank 0 stays in step."""

    def __init__(self, path: str, header: Header) -> None:
        self._failure: Exception | None = None
        self._context = create_checkpoint(path, header)
        try:
            self._writer = self._context.__enter__()
        except Exception as error:
            self._failure = error

    def add_variable(self, path: str, array: np.ndarray | None, modes: dict[str, Any]) -> None:
        """Write `array`, which rank 0 always has."""
        if array is not None:
            self._attempt(lambda writer: writer.add_variable(path, array, **modes))

    def add_state(self, path: str, state: dict[str, Any], arrays: Sequence[str]) -> None:
        """Write JSON state, and the names of the arrays that belong to it."""
        self._attempt(lambda writer: writer.add_state(path, state, arrays))

    def _attempt(self, add: Callable[[CheckpointWriter], None]) -> None:
        if self._failure is None:
            try:
                add(self._writer)
            except Exception as error:
                self.abandon(error)

    def abandon(self, error: BaseException) -> None:
        """Remove what has been written, because of `error`."""
        if self._failure is not None:
            return
        self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        try:
            self._context.__exit__(type(error), error, error.__traceback__)
        except Exception as told:  # the same error in the words of this library
            self._failure = told

    def complete(self) -> None:
        """Put the file in its place, or raise what went wrong."""
        if self._failure is not None:
            raise self._failure
        self._context.__exit__(None, None, None)


class _NoFile(_RootFile):
    """Stand-in on the ranks that write nothing."""

    def __init__(self) -> None:
        pass

    def _attempt(self, add: Callable[[CheckpointWriter], None]) -> None:
        pass

    def abandon(self, error: BaseException) -> None:
        """Do nothing."""

    def complete(self) -> None:
        """Do nothing."""
