"""Rank 0's part of a save, in step with the other ranks whatever it meets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import CheckpointWriter, Item, create_checkpoint
from mpistrat.collectives import Collectives

__all__ = ["RootFile", "RootWork", "file_of_root"]


class RootWork:
    """Work of rank 0 between collectives, whose first failure is kept until `check`."""

    def __init__(self, ranks: Collectives) -> None:
        self._is_root = ranks.rank == 0
        self._failure: Exception | None = None

    def attempt(self, do: Callable[..., object], *arguments: Any) -> None:
        """Call `do` on rank 0, unless something has failed before. Local."""
        if self._is_root and self._failure is None:
            try:
                do(*arguments)
            except Exception as error:
                self.abandon(error)

    def attempt_each(self, do: Callable[[Item], object], items: Iterable[Item]) -> None:
        """Go through all `items` on every rank, and call `do` with each on rank 0."""
        for item in items:
            self.attempt(do, item)
            del item  # or the next would come while this one is there

    def abandon(self, error: BaseException) -> None:
        """Do nothing more, because of `error`. Local."""
        if self._failure is None:
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def check(self) -> None:
        """Raise what went wrong. Local."""
        if self._failure is not None:
            raise self._failure


class RootFile(RootWork):
    """The file that rank 0 writes."""

    def __init__(self, ranks: Collectives, path: str, header: Header) -> None:
        super().__init__(ranks)
        self._context = create_checkpoint(path, header)
        self._writer: CheckpointWriter | None = None
        self.attempt(self._open)

    def _open(self) -> None:
        self._writer = self._context.__enter__()

    def attempt_with(self, add: Callable[[CheckpointWriter], object]) -> None:
        """Call `add` on rank 0 with the writer, unless something has failed before. Local."""
        if self._writer is not None:
            self.attempt(add, self._writer)

    def write(self, item: Item) -> None:
        """Write `item` on rank 0. Local."""
        self.attempt_with(lambda writer: writer.add(item))

    def abandon(self, error: BaseException) -> None:
        """Remove what has been written, because of `error`. Local."""
        super().abandon(error)
        if self._writer is not None:
            self._writer = None
            try:
                self._context.__exit__(type(error), error, error.__traceback__)
            except Exception as told:  # the same error in the words of this library
                self._failure = told

    def complete(self) -> None:
        """Put the file in its place on rank 0, or raise what went wrong. Local."""
        self.check()
        if self._writer is not None:
            self._context.__exit__(None, None, None)


@contextlib.contextmanager
def file_of_root(
    ranks: Collectives, what: str, path: str, header: Header
) -> Iterator[RootFile]:
    """Have rank 0 write the file `path`, for the public function `what`. **Collective**.

    Where rank 0 fails to write, it still takes part for the rest, and the error is raised on
    every rank at the end.
    """
    file = RootFile(ranks, path, header)
    try:
        yield file
    except BaseException as error:
        file.abandon(error)
        raise
    with ranks.together(what, path):
        file.complete()
