"""Restore a tree of objects: rank 0 reads and checks, all ranks assign, or none does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint.distribution import broadcast_array, broadcast_pieces, read_arrays
from mpistrat.checkpoint.late import attach_children, fresh_children, late_children, make_children
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.checkpoint.restoration import Restoration
from mpistrat.checkpoint.shapes import Shape, check_shapes, shapes_as_json, shapes_from_json
from mpistrat.checkpoint.status import RestoreStatus, check_nothing_missing
from mpistrat.collectives import Collectives
from mpistrat.errors import CheckpointCorruptError
from mpistrat.spans import spanned
from mpistrat.tracking import Trackable
from mpistrat.variables import Variable

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
    arrays: dict[str, np.ndarray] = {}
    modes: dict[str, dict[str, Any]] = {}
    contents: dict[str, Any] = {}
    with ranks.together(_WHAT, file):
        if ranks.rank == 0:
            arrays, modes, contents = _read(file)
    contents = ranks.broadcast_json(contents)
    state, shapes = contents["state"], shapes_from_json(contents["shapes"])
    late = late_children(tree)
    made = make_children(late, tree, shapes)
    tree.variables |= made
    fresh = fresh_children(late, tree, {*shapes, *state})
    variables = {name: tree.variables[name] for name in shapes if name in tree.variables}
    with ranks.together(_WHAT, file):
        check_shapes(file, tree, shapes)
        if not allow_missing:
            check_nothing_missing(file, tree, {*shapes, *state, *fresh})
        for name, variable in variables.items():
            variable.load_piece(0, np.empty(0, shapes[name][1]))  # refuses now or never
    others = {name: shape for name, shape in shapes.items() if name not in variables}
    restoration = Restoration(file, _broadcast(ranks, file, arrays, others), state, modes=modes)
    _load_state(ranks, restoration, tree)
    _load_variables(ranks, file, variables, arrays, shapes)
    for variable in fresh.values():
        variable.load_value(np.zeros(variable.shape, variable.dtype))
    attach_children(late, made)
    restoration.take(tree, {**variables, **fresh})
    restoration.wait_for_children("", root)
    if ranks.rank == 0:
        _logger.info("Checkpoint %s restored in %.2f s", file, time.perf_counter() - began_s)
    return RestoreStatus(root, restoration, warns=ranks.rank == 0)


def _read(
    path: str,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the arrays of a file, their modes, and as JSON values their shapes and all state."""
    with open_checkpoint(path) as reader:
        try:
            state = {name: reader.read_state(name) for name in reader.state_paths}
        except CheckpointCorruptError:
            reader.verify()  # names what else is damaged
            raise
        modes = {name: each.modes for name, each in reader.variables.items()}
        arrays = read_arrays(reader)
    shapes = {name: (arrays[name].shape, arrays[name].dtype) for name in modes}
    return arrays, modes, {"state": state, "shapes": shapes_as_json(shapes)}


def _broadcast(
    ranks: Collectives, path: str, arrays: dict[str, np.ndarray], shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Move those of rank 0's `arrays` that `shapes` names to every rank. **Collective**."""
    with ranks.call(_WHAT, path) as call:
        call.agree("values without an object", *shapes)
        return {
            name: broadcast_array(call, arrays.pop(name, None), shape)
            for name, shape in shapes.items()
        }


def _load_variables(
    ranks: Collectives,
    path: str,
    variables: Mapping[str, Variable],
    arrays: dict[str, np.ndarray],
    shapes: Mapping[str, Shape],
) -> None:
    """Assign rank 0's `arrays` to `variables` on every rank, piece by piece. **Collective**."""
    with ranks.call(_WHAT, path) as call:
        call.agree("values of variables")
        for name, variable in variables.items():
            for start, piece in broadcast_pieces(call, arrays.pop(name, None), shapes[name]):
                variable.load_piece(start, piece)


def _load_state(ranks: Collectives, restoration: Restoration, tree: Tree) -> None:
    """Fill the objects of the user's own: only these can still refuse, so they come first."""
    undo: Callable[[], None] | None = None
    try:
        with ranks.together(_WHAT, restoration.path):
            undo = restoration.load_state(tree)
    except Exception:
        if undo is not None:
            undo()
        raise
