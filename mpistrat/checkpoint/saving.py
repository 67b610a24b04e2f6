"""Save a tree of objects: all ranks bring their values, rank 0 writes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpistrat.arrays import Array
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.gathering import Gathering
from mpistrat.checkpoint.writer import CheckpointWriter, create_checkpoint
from mpistrat.collectives import Collectives
from mpistrat.spans import spanned
from mpistrat.tracking import Trackable

__all__ = ["save"]

_WHAT = "Checkpoint.write"
_logger = logging.getLogger("mpistrat")


@spanned("checkpoint", _WHAT)
def save(root: Trackable, path: str | os.PathLike[str], step: int = -1) -> str:
    """Write the state below `root` to `path`, and return it as a string. **Collective**.

    Variables travel one at a time. Where rank 0 fails to write, it still takes part for the
    rest, and the error is raised on every rank at the end.
    """
    began_s = time.perf_counter()
    gathering = Gathering(root, _WHAT, path)
    ranks, target = gathering.ranks, gathering.path
    with _file_of_root(ranks, target, gathering.header(step)) as file:
        gathering.send_to(file)
    if ranks.rank == 0:
        _logger.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - began_s)
    return target


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

    def add_variable(
        self, path: str, array: Array | None, modes: dict[str, Any], lives_on: bool
    ) -> None:
        """Write `array`, which rank 0 always has."""
        if array is not None:
            self._attempt(
                lambda writer: writer.add_variable(path, array, **modes, lives_on=lives_on)
            )

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
