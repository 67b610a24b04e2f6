"""Restore a tree of objects: what is read and checked all ranks assign, or none does."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from mpistrat.checkpoint.distribution import broadcast_array, load_variables
from mpistrat.checkpoint.late import attach_children, fresh_children, late_children, make_children
from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.paths import agree_on_path
from mpistrat.checkpoint.ranks import collectives_for
from mpistrat.checkpoint.reader import CheckpointReader, open_checkpoint
from mpistrat.checkpoint.reading import Places, Values, find_places, read_values
from mpistrat.checkpoint.restoration import Restoration
from mpistrat.checkpoint.shapes import Shape, check_shapes, shapes_as_json, shapes_from_json
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
    state, shapes, values = _read(ranks, file)
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
    arrays = _broadcast(ranks, file, values, others)
    restoration = Restoration(file, arrays, state)
    _load_state(ranks, restoration, tree)
    with ranks.call(_WHAT, file) as call:
        call.agree("values of variables")
        load_variables(call, values, variables)
    for variable in fresh.values():
        variable.load_value(np.zeros(variable.shape, variable.dtype))
    attach_children(late, made)
    restoration.take(tree, {**variables, **fresh})
    restoration.wait_for_children("", root)
    if ranks.rank == 0:
        _logger.info("Checkpoint %s restored in %.2f s", file, time.perf_counter() - began_s)
    return RestoreStatus(root, restoration, warns=ranks.rank == 0)


def _read(
    ranks: Collectives, path: str
) -> tuple[dict[str, Any], dict[str, Shape], Values]:
    """Return state, shapes and values of a file that is known to be whole. **Collective**."""
    contents: dict[str, Any] = {}
    reader: CheckpointReader | None = None
    with contextlib.ExitStack() as stack:
        with ranks.together(_WHAT, path):
            if ranks.rank == 0:
                reader = stack.enter_context(open_checkpoint(path))
                contents = _describe(reader)
        contents = ranks.broadcast_json(contents)
        shapes = shapes_from_json(contents["shapes"])
        places = Places(**contents["places"])
        values = read_values(ranks, _WHAT, path, reader, places, shapes)
    return contents["state"], shapes, values


def _describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return as JSON values all state of a file, and the shapes and places of its arrays."""
    try:
        state = {name: reader.read_state(name) for name in reader.state_paths}
    except CheckpointCorruptError:
        reader.verify()  # names what else is damaged
        raise
    shapes = {name: (each.shape, each.dtype) for name, each in reader.variables.items()}
    places = asdict(find_places(reader))
    return {"state": state, "shapes": shapes_as_json(shapes), "places": places}


def _broadcast(
    ranks: Collectives, path: str, values: Values, shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Move those of the `values` that `shapes` names to every rank. **Collective**."""
    with ranks.call(_WHAT, path) as call:
        call.agree("values without an object", *shapes)
        return {
            name: broadcast_array(call, values, name, shape)
            for name, shape in shapes.items()
        }


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
