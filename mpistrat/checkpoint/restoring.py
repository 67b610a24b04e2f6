"""Restore a tree of objects: rank 0 reads, all ranks check and assign, or none does."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from mpistrat.checkpoint.distribution import Stored, distribute, stored_in
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for
from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.checkpoint.restoration import Restoration
from mpistrat.checkpoint.shapes import check_shapes
from mpistrat.checkpoint.status import RestoreStatus, check_nothing_missing
from mpistrat.collectives import Collectives
from mpistrat.errors import CheckpointCorruptError
from mpistrat.spans import spanned
from mpistrat.tracking import Trackable

__all__ = ["restore"]

_WHAT = "Checkpoint.restore"
_logger = logging.getLogger("mpistrat")


@spanned("checkpoint", _WHAT)
def restore(
    root: Trackable, path: str | os.PathLike[str], *, allow_missing: bool = True
) -> RestoreStatus:
    """Fill the objects below `root` from the file `path`. **Collective**.

    Everything is read, checked and compared before the first object changes.

    Parameters
    ----------
    root : Trackable
    path : path
    allow_missing : bool
        Whether objects that the file does not have may stay as they are.
    """
    began_s = time.perf_counter()
    tree = walk(root.checkpoint_children())
    ranks = collectives_for(tree, _WHAT)
    file = agree_on_path(ranks, _WHAT, path)
    with contextlib.ExitStack() as stack:
        reader: CheckpointReader | None = None
        contents: dict[str, Any] = {}
        with ranks.together(_WHAT, file):
            if ranks.rank == 0:
                reader = stack.enter_context(open_checkpoint(file))
                contents = _contents(reader)
        contents = ranks.broadcast_json(contents)
        state = contents["state"]
        stored = {name: Stored.from_json(each) for name, each in contents["arrays"].items()}
        with ranks.together(_WHAT, file):
            check_shapes(file, tree, {name: (s.shape, s.dtype) for name, s in stored.items()})
            if not allow_missing:
                check_nothing_missing(file, tree, {*stored, *state})
        arrays = distribute(ranks, _WHAT, file, stored, reader)
    restoration = Restoration(file, arrays, state)
    _load(ranks, restoration, tree)
    restoration.take(tree)
    restoration.wait_for_children("", root)
    if ranks.rank == 0:
        _logger.info("Checkpoint %s restored in %.2f s", file, time.perf_counter() - began_s)
    return RestoreStatus(root, restoration, warns=ranks.rank == 0)


def _contents(reader: CheckpointReader) -> dict[str, Any]:
    """Return all of a file but the values of its arrays."""
    try:
        state = {name: reader.read_state(name) for name in reader.state_paths}
    except CheckpointCorruptError:
        reader.verify()  # names what else is damaged
        raise
    return {
        "state": state,
        "arrays": {name: each.as_json() for name, each in stored_in(reader).items()},
    }


def _load(ranks: Collectives, restoration: Restoration, tree: Tree) -> None:
    """Assign everything. Only objects of the user's own can still refuse, so they come first."""
    undo: Callable[[], None] | None = None
    try:
        with ranks.together(_WHAT, restoration.path):
            undo = restoration.load_state(tree)
    except Exception:
        if undo is not None:
            undo()
        raise
    with ranks.together(_WHAT, restoration.path):
        restoration.load_variables(tree)
