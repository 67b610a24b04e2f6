"""Ownership of checkpoint paths: within a job, one set of ranks writes a file.

Groups of ranks of one job need not be in contact, so what they must know of each other is in the
file: it says which ranks wrote it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mpistrat import context, hdf5
from mpistrat.checkpoint.format import FORMAT, VARIABLES, Header
from mpistrat.checkpoint.nodes import read_attribute
from mpistrat.checkpoint.object_graph import Tree
from mpistrat.checkpoint.torch_hook import world_strategy
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.mpi.launcher import find_launcher, is_one_of_several, unconnected_task
from mpistrat.mpi.world import is_started, started_world
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.system.files import claimed, hidden_beside
from mpistrat.system.text import rank_list
from mpistrat.user_warnings import warn_once

WRITERS = "writers"
"""The attribute of the group of variables, in files of jobs of several ranks."""
# The root group has eight: with a ninth, HDF5 would store them where damage can hide one.

_BEGAN_S = time.time()
"""Files that are older come from another job, perhaps with other ranks."""

_LONGEST_COMMIT_S = 10.0
"""A look into a file and a rename take no longer."""


@dataclass(frozen=True)
class Writers:
    """Ranks that write files together."""

    ranks: tuple[int, ...]
    """In COMM_WORLD."""
    world_size: int
    collectives: Collectives | None = field(default=None, compare=False, repr=False)
    """Of their strategy, which gives up its paths when it is closed."""

    @classmethod
    def of(cls, collectives: Collectives) -> Writers | None:
        """Return the ranks of `collectives`, ``None`` where the job has one rank."""
        transport = collectives.channel.transport
        if transport.world_size > 1:
            return cls(tuple(transport.world_ranks), transport.world_size, collectives)
        world = started_world() if is_started() else None
        return None if world is None else cls((world.rank,), world.size)

    @property
    def is_named(self) -> bool:
        """Whether a file says who wrote it."""
        # With num_replicas= the ranks of a whole job write the same file at any number of them.
        are_all = len(self.ranks) == self.world_size or (
            self.collectives is not None and self.collectives.is_elastic
        )
        has_many = self.collectives is not None and self.collectives.arithmetic != ""
        return not (are_all and has_many)

    def __str__(self) -> str:
        return f"{rank_list(self.ranks)} of {self.world_size}"

    def check(self, path: Path) -> None:
        """Raise `CheckpointError` if other ranks of this job have written `path`."""
        other = _writers_of(path)
        if other is None or other == str(self) or not other.endswith(f"of {self.world_size}"):
            return
        raise CheckpointError(
            f"The checkpoint {path} cannot be written by {self}: {other} of this job have written "
            "it, and one would replace what the other has saved. Give each strategy its own path, "
            "or remove the file first. It is unchanged."
        )

    @contextlib.contextmanager
    def commit(self, path: Path, created: str) -> Iterator[None]:
        """Check `path` while no other writer gives a file this name, which is the body's work."""
        # `created` is that attribute of the file.
        with claimed(path, _LONGEST_COMMIT_S):
            self.check(path)
            yield
            if self.collectives is not None:
                _release_at_close(self.collectives, path, created)


def _writers_of(path: Path) -> str | None:
    """Return who wrote a file since this job began, ``None`` if it does not say so."""
    try:
        if path.stat().st_mtime < _BEGAN_S - 60:  # spares the look into most files
            return None
        with hdf5.open_for_reading(path, CheckpointError) as file:
            found = read_attribute(file[VARIABLES].id, WRITERS)
            created = str(read_attribute(file.id, "created"))
        is_ours = Header(created=created).created_s >= _BEGAN_S
        if is_ours and _released(path).exists():
            is_ours = _released(path).read_text() != created
    except (OSError, RuntimeError, ValueError, KeyError):  # there is none, or it is damaged
        return None
    return found if is_ours and isinstance(found, str) else None


_MANY = 64


def _release_at_close(collectives: Collectives, path: Path, created: str) -> None:
    actions = collectives.on_close
    if len(actions) >= _MANY:  # a manager has removed most of its files
        for gone in [each for each in actions if isinstance(each, Path) and not each.exists()]:
            del actions[gone]
    actions[path] = partial(_release, path, created)


def _released(path: Path) -> Path:
    """Return the path of the mark that the file `path` belongs to nobody any more."""
    return hidden_beside(path, "released")


def _release(path: Path, created: str) -> None:
    """Give up `path`, as long as the file there is the one that was `created` then."""
    # Other ranks need not be in contact, so a mark lies beside the file until the job ends.
    with contextlib.suppress(OSError):
        _released(path).write_text(created)
        at(Phase.AFTER_LAST_ROUND, partial(_released(path).unlink, missing_ok=True))


class Replaces(enum.Enum):
    """What a save may replace."""

    CHECKPOINTS = enum.auto()
    """A file that is a checkpoint."""
    OWN_NAMES = enum.auto()
    """A file with a name that only a `CheckpointManager` gives; no intact data file."""
    ANYTHING = enum.auto()


def check_may_replace(path: str, replaces: Replaces) -> None:
    """Raise `CheckpointError` if `path` is a file that a save must not overwrite."""
    if replaces is Replaces.ANYTHING or not os.path.isfile(path):
        return
    remedy = (
        "It is unchanged. Write to another path, remove the file first, or replace it by "
        "Checkpoint.write(path, overwrite=True)."
    )
    try:
        with hdf5.open_for_reading(path, CheckpointError) as file:
            names = ", ".join(map(repr, list(file)[:4]))
            is_checkpoint = file.attrs.get("format") in (FORMAT, FORMAT.encode())
    except PermissionError:
        return  # nobody can look into it; writing says what may not be done
    except (OSError, RuntimeError) as reason:
        if replaces is Replaces.OWN_NAMES:
            return  # damaged: a job that resumes before it writes it again
        raise CheckpointError(
            f"The checkpoint {path} would replace a file that is not a readable HDF5 file: "
            f"{reason} {remedy}"
        ) from None
    if not is_checkpoint:
        raise CheckpointError(
            f"The checkpoint {path} would replace an HDF5 file that is not a checkpoint, with "
            f"{names or 'nothing'} at its top. {remedy}"
        )


def writes_here(tree: Tree, collectives: Collectives) -> bool:
    """Return whether this rank takes part: outside of any strategy only rank 0 writes."""
    if collectives.size > 1:
        return True
    frame = context.current()
    found: list[Any] = [] if frame is None else [frame.strategy]
    for group in (tree.variables, tree.stateful, tree.trackables):
        found += [getattr(each, "strategy", None) for each in group.values()]
    if any(_is_own(strategy) for strategy in found) or _is_own(world_strategy()):
        return True
    if is_started():
        world = started_world()
        return world is None or bool(world.rank == 0)
    # A program of several processes that has not started MPI, such as one of torch over gloo.
    return not is_one_of_several() or find_launcher().task == 0


def warn_if_unconnected(what: str, path: str) -> None:
    """Warn if a launcher started several processes that MPI does not connect. Local."""
    found = None if is_started() and _has_others() else unconnected_task()
    if found is None or found[2] == 0:  # which may be the only one that saves
        return
    launcher, tasks, task = found
    warn_once(
        f"{what} saves the state of process {task} of {tasks} that {launcher} started, to "
        f"{path!r}. MPI does not connect them, so nothing compares their states, and each process "
        "that saves to one path replaces the file. Start the program by mpistrat run, mpiexec or "
        "srun --mpi=..., save on process 0 only, or give each process its own path.",
        key="unconnected",
    )


def _has_others() -> bool:
    world = started_world()
    return world is not None and world.size > 1


def _is_own(strategy: Any) -> bool:
    extended = getattr(strategy, "extended", None)
    return extended is not None and not getattr(extended, "_is_default", False)
