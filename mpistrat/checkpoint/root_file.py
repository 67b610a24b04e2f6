"""Work of rank 0 between collectives, and the file that it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat.checkpoint.collect import StateCollector
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.ownership import Writers
from mpistrat.checkpoint.writer import CheckpointWriter, Item, create_checkpoint
from mpistrat.collectives.collectives import Collectives


class RootWork:
    """Work of rank 0 between collectives, whose first failure is kept until `check`."""

    def __init__(self, collectives: Collectives) -> None:
        self._is_root = collectives.rank == 0
        self._failure: Exception | None = None

    def attempt(self, do: Callable[..., object], *arguments: Any) -> None:
        """Call `do` on rank 0, unless something has failed before."""
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
        """Do nothing more, because of `error`."""
        if self._failure is None:
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure


class RootFile(RootWork):
    """The file that rank 0 writes."""

    def __init__(
        self, collectives: Collectives, path: str, header: Header, writers: Writers | None
    ) -> None:
        super().__init__(collectives)
        self._context = create_checkpoint(path, header, writers)
        self._writer: CheckpointWriter | None = None
        self.attempt(self._open)

    def _open(self) -> None:
        self._writer = self._context.__enter__()

    def attempt_with(self, add: Callable[[CheckpointWriter], object]) -> None:
        """Call `add` on rank 0 with the writer, unless something has failed before."""
        if self._writer is not None:
            self.attempt(add, self._writer)

    def write(self, item: Item) -> None:
        """Write `item` on rank 0. **Collective** where it comes in pieces."""
        if item.pieces is None:
            self.attempt_with(lambda writer: writer.add(item))
            return
        steps: list[Callable[..., None]] = []
        self.attempt_with(lambda writer: steps.extend(writer.begin(item)))
        for piece in item.pieces:
            if steps:
                self.attempt(steps[0], piece)
            del piece
        if steps:
            self.attempt(steps[1])

    def write_each(self, items: Iterable[Item]) -> None:
        """Write all `items`. **Collective** as they are."""
        for item in items:
            self.write(item)
            del item  # or the next would come while this one is there

    def abandon(self, error: BaseException) -> None:
        """Remove what has been written, because of `error`."""
        super().abandon(error)
        if self._writer is not None:
            self._writer = None
            try:
                self._context.__exit__(type(error), error, error.__traceback__)
            except Exception as explained:
                self._failure = explained

    def complete(self) -> None:
        """Put the file in its place on rank 0, or raise what went wrong."""
        self.check()
        if self._writer is not None:
            self._context.__exit__(None, None, None)


@contextlib.contextmanager
def file_of_root(gathering: StateCollector, what: str, header: Header) -> Iterator[RootFile]:
    """Have rank 0 write the file of `gathering`, for the public function `what`. **Collective**.

    Where rank 0 fails to write, it still takes part for the rest, and the error is raised on
    every rank at the end.
    """
    collectives, path = gathering.collectives, gathering.path
    file = RootFile(collectives, path, header, gathering.writers)
    try:
        yield file
    except BaseException as error:
        file.abandon(error)
        raise
    with collectives.common_outcome(what, path):
        file.complete()
