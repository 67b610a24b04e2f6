"""Restore a tree of objects: rank 0 reads and checks, all ranks assign, or none does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.checkpoint.format import VARIABLES
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.checkpoint.restoration import Restoration
from mpistrat.checkpoint.shapes import check_shapes
from mpistrat.checkpoint.status import RestoreStatus, check_nothing_missing
from mpistrat.collectives import Collectives
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
    arrays: dict[str, np.ndarray] = {}
    state: dict[str, Any] = {}
    file = agree_on_path(ranks, _WHAT, path)
    with ranks.together(_WHAT, file):
        if ranks.rank == 0:
            arrays, state = _read(file)
    state = ranks.broadcast_json(state)
    types = ranks.broadcast_json([[p, a.shape, a.dtype.str] for p, a in arrays.items()])
    stored = {name: (tuple(shape), np.dtype(dtype)) for name, shape, dtype in types}
    with ranks.together(_WHAT, file):
        check_shapes(file, tree, stored)
        if not allow_missing:
            check_nothing_missing(file, tree, {*stored, *state})
    for name, (shape, dtype) in stored.items():
        own = arrays.get(name)
        arrays[name] = ranks.broadcast(np.empty(shape, dtype) if own is None else own)
    restoration = Restoration(file, arrays, state)
    _load(ranks, restoration, tree)
    restoration.take(tree)
    restoration.wait_for_children("", root)
    if ranks.rank == 0:
        _logger.info("Checkpoint %s restored in %.2f s", file, time.perf_counter() - began_s)
    return RestoreStatus(root, restoration, warns=ranks.rank == 0)


def _read(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays: dict[str, np.ndarray] = {}
    state: dict[str, Any] = {}
    with open_checkpoint(path) as reader:
        for group, name, value in reader.read_each():
            (arrays if group == VARIABLES else state)[name] = value
    return arrays, state


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
