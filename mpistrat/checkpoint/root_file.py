"""The file that is being saved, as rank 0 and as the other ranks see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpistrat.arrays import Array
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.gathering import Life
from mpistrat.checkpoint.writer import CheckpointWriter, create_checkpoint
from mpistrat.collectives import Collectives

__all__ = ["RootFile", "file_of_root"]


@contextlib.contextmanager
def file_of_root(
    ranks: Collectives, what: str, path: str, header: Header
) -> Iterator[RootFile]:
    """Give rank 0 the file `path` and the other ranks a stand-in. **Collective**.

    Where rank 0 fails to write, it still takes part for the rest, and the error is raised on
    every rank at the end.

    Parameters
    ----------
    ranks : Collectives
    what : str
        The public function, for messages.
    path : str
    header : Header
    """
    file = RootFile(path, header) if ranks.rank == 0 else _NoFile()
    try:
        yield file
    except BaseException as error:
        file.abandon(error)
        raise
    with ranks.together(what, path):
        file.complete()


class RootFile:
    """The file on rank 0. A failure is kept until `complete`, so that rank 0 stays in step."""

    def __init__(self, path: str, header: Header) -> None:
        self._failure: Exception | None = None
        self._context = create_checkpoint(path, header)
        try:
            self._writer = self._context.__enter__()
        except Exception as error:
            self._failure = error

    def add_variable(
        self, path: str, array: Array | None, modes: dict[str, Any], life: Life
    ) -> None:
        """Write `array`, which rank 0 always has. Local."""
        if array is not None:
            lives_on = life is not Life.BRIEF
            self.attempt(
                lambda writer: writer.add_variable(path, array, **modes, lives_on=lives_on)
            )

    def add_state(self, path: str, state: dict[str, Any], arrays: Sequence[str]) -> None:
        """Write JSON state, and the names of the arrays that belong to it. Local."""
        self.attempt(lambda writer: writer.add_state(path, state, arrays))

    def attempt(self, add: Callable[[CheckpointWriter], None]) -> None:
        """Call `add` on rank 0 with the writer, unless something has failed before. Local."""
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


class _NoFile(RootFile):
    """Stand-in on the ranks that write nothing."""

    def __init__(self) -> None:
        pass

    def attempt(self, add: Callable[[CheckpointWriter], None]) -> None:
        """Do nothing."""

    def abandon(self, error: BaseException) -> None:
        """Do nothing."""

    def complete(self) -> None:
        """Do nothing."""
