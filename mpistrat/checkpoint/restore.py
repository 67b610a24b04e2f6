"""Restore of all objects on all ranks, or of none: everything is checked before any change."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.checkpoint.deferred import (
    Restoration,
    StateLoading,
    attach_slots,
    check_shapes,
    deferred_slots,
    describe,
    find_shards,
    fresh_slots,
    make_slots,
    no_shards,
)
from mpistrat.checkpoint.format import checked_path
from mpistrat.checkpoint.object_graph import Tree, collectives_for, tree_of
from mpistrat.checkpoint.read import (
    Shape,
    SharedFile,
    Values,
    broadcast_array,
    keep_components,
    load_all_components,
    load_variables,
    open_together,
    read_components,
)
from mpistrat.checkpoint.replica_state import assign_replicas, check_owner_is_known
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointCorruptError, _UnmatchedPathsError
from mpistrat.tracing.spans import spanned
from mpistrat.trackable import Trackable

_logger = logging.getLogger("mpistrat")


class RestoreStatus:
    """The result of `Checkpoint.restore`.

    Unless one of the methods here has been called, the logger ``mpistrat`` warns twice: when this
    object is deleted, of objects of the program that the file lacks; when the checkpoint object is
    deleted, of paths of the file that no object has taken. While paths wait for their objects,
    nothing can be saved, unless `expect_partial` has been called.
    """

    def __init__(
        self, root: Trackable, restoration: Restoration, warns: bool, lacking: Sequence[str]
    ) -> None:
        self._root = root
        self._restoration = restoration
        self._lacking_warning = weakref.finalize(self, _warn_of_lacking, restoration.path, lacking)
        # finalize keeps its arguments alive until it runs, so it gets the two dicts and not
        # `restoration`, which would then never be collected. `take` removes entries from these same
        # dicts.
        self._warning = weakref.finalize(
            restoration, _warn_of_rest, restoration.path, restoration.arrays, restoration.state
        )
        if not warns:
            self._silence()

    def assert_consumed(self) -> RestoreStatus:
        """Check that the file and the program have the same paths, all restored. Local.

        Returns
        -------
        RestoreStatus
            This object.

        Raises
        ------
        CheckpointMismatchError
            If not (it is also an AssertionError); the message names all paths.
        """
        self._silence()
        self._check(self._unexpected())
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that every object that the program has so far was in the file. Local.

        Returns
        -------
        RestoreStatus
            This object.

        Raises
        ------
        CheckpointMismatchError
            If not (it is also an AssertionError); the message names all paths.
        """
        self._silence()
        self._check([])
        return self

    def expect_partial(self) -> RestoreStatus:
        """Accept paths without a match. Local.

        There is no warning, and objects may be saved while values wait for others, which are then
        not in the new file. Objects that are created later still get their values.

        Returns
        -------
        RestoreStatus
            This object.
        """
        self._silence()
        self._restoration.is_partial = True
        return self

    def __repr__(self) -> str:
        restoration = self._restoration
        return (
            f"<RestoreStatus of {restoration.path!r}: {len(restoration.restored)} restored, "
            f"{len(restoration.left())} still waiting>"
        )

    def _silence(self) -> None:
        self._warning.detach()
        self._lacking_warning.detach()

    def _unexpected(self) -> list[str]:
        return [f"{path} ({of})" for path, of in self._restoration.left().items()]

    def _check(self, unexpected: list[str]) -> None:
        tree = tree_of(self._root)
        missing = _missing(tree, self._restoration.restored)
        _raise_unmatched(self._restoration.path, missing, unexpected)


def check_nothing_missing(path: str, tree: Tree, stored: set[str]) -> None:
    """Check that the file `path` with the paths `stored` has every object of `tree`."""
    _raise_unmatched(path, _missing(tree, stored), [])


def _missing(tree: Tree, present: set[str]) -> list[str]:
    lines = [
        f"{path} ({describe(variable.full_shape, variable.dtype)})"
        for path, variable in tree.variables.items()
        if path not in present
    ]
    return lines + [f"{path} (state)" for path in tree.stateful if path not in present]


def _raise_unmatched(path: str, missing: list[str], unexpected: list[str]) -> None:
    if not missing and not unexpected:
        return
    lines = [f"The checkpoint {path} and the objects of this program do not match."]
    if missing:
        lines += ["Missing in the file:", *(f"  {line}" for line in missing)]
    if unexpected:
        lines += ["Unexpected in the file:", *(f"  {line}" for line in unexpected)]
    lines += ["Call expect_partial() on the status where this is meant."]
    raise _UnmatchedPathsError("\n".join(lines))


def _warn_of_rest(path: str, arrays: dict[str, np.ndarray], state: dict[str, Any]) -> None:
    if arrays or state:
        _logger.warning(
            "No object took %s from the checkpoint %s. Call expect_partial() on the status of "
            "restore() where this is meant.",
            ", ".join([*arrays, *state]),
            path,
        )


def _warn_of_lacking(path: str, lacking: Sequence[str]) -> None:
    if lacking:
        _logger.warning(
            "The checkpoint %s lacks %s, which kept the values that they had. Call "
            "expect_partial() on the status of restore() where this is meant.",
            path,
            ", ".join(lacking),
        )


_WHAT = "Checkpoint.restore"


@spanned("checkpoint", _WHAT)
def restore(
    root: Trackable, path: str | os.PathLike[str], *, allow_missing: bool = True
) -> RestoreStatus:
    """Fill the objects below `root` from the file `path`. **Collective**.

    Everything is read, checked and compared before the first object changes.
    """
    began_s = time.perf_counter()
    tree = tree_of(root)
    if tree.stateful:
        check_owner_is_known(tree, _WHAT)
    collectives = collectives_for(tree, _WHAT)
    with collectives.call(_WHAT) as call:
        path = checked_path(_WHAT, path)
        call.agree(path)
    layout = collectives.layout
    # The file stays open to the end of the restore. If a different process renames a new checkpoint
    # to this path meanwhile, all ranks still read the file that they checked.
    with open_together(collectives, _WHAT, path) as file:
        state, shapes = file.state, file.shapes
        slots = deferred_slots(tree)
        # Created before the check, but attached to their owners only at the end: if the restore
        # fails, the optimizer has no new slots.
        made = make_slots(slots, tree, shapes)
        tree.variables |= made
        fresh = fresh_slots(slots, tree, {*shapes, *state})
        variables = {name: tree.variables[name] for name in shapes if name in tree.variables}

        def check() -> None:
            if tree.stateful:
                assign_replicas(tree.stateful.values(), layout)
            check_shapes(path, tree, shapes, state)
            if not allow_missing:
                check_nothing_missing(path, tree, {*shapes, *state, *fresh})
            file.leave(find_shards(tree, shapes, state), variables)
            for name in variables.keys() - file.in_place.keys():
                variables[name]._load_piece(0, np.empty(0, shapes[name][1]))  # raises now or never

        values = _read(collectives, file, check)
        here = variables.keys() | file.shards.keys()
        others = {name: shape for name, shape in shapes.items() if name not in here}
        # Read here, before the first object changes, so that damaged components also fail the
        # restore.
        components = read_components(collectives, file, variables, others)
        restoration = Restoration(
            path,
            layout,
            _broadcast(collectives, path, values, others),
            state,
            read_shards=file.read_shards,
        )
        loading = _load_state(collectives, restoration, tree)
        with collectives.call(_WHAT, path) as call:
            loading.load_rest()
            # The descriptor is closed at the end of this block. Objects that are attached later
            # must not read from its number, which the system may have given to a different file.
            restoration.read_shards = no_shards
            call.agree("values of variables")
            sent = {n: each for n, each in variables.items() if n not in file.in_place}
            load_variables(call, values, sent)
        # When the file was saved, its program had not created these slots yet, and a new slot is
        # zero.
        for variable in fresh.values():
            variable._load_value(np.zeros(variable.full_shape, variable.dtype))
        with collectives.common_outcome(_WHAT, path):  # no rank reads values that others still load
            file.load_in_place()
        load_all_components(collectives, components, variables)
        restoration.components = keep_components(collectives, components, others)
        attach_slots(slots, made)
        lacking = _missing(tree, {*shapes, *state, *fresh})  # `take` removes entries of `state`
        restoration.take(tree, {**variables, **fresh})
        restoration.wait_for_children("", root)
    if collectives.rank == 0:
        _logger.info("Checkpoint %s restored in %.2f s", path, time.perf_counter() - began_s)
    return RestoreStatus(root, restoration, collectives.rank == 0, lacking)


def _read(collectives: Collectives, file: SharedFile, check: Callable[[], None]) -> Values:
    """Return the values of a file that is intact and passes `check`. **Collective**."""
    values = Values({}, {})

    def check_and_read() -> dict[str, str]:
        nonlocal values
        check()
        values = file.read()
        return file.damage

    damage: dict[str, str] = {}
    # Damage is returned, not raised: every rank reads its part to the end, and one error names all
    # damage of all ranks.
    for each in collectives.on_all(check_and_read, _WHAT, file.path):
        damage |= each
    if damage:
        with collectives.common_outcome(_WHAT, file.path):
            if collectives.rank == 0:
                raise CheckpointCorruptError("\n".join(damage[name] for name in sorted(damage)))
    return values


def _broadcast(
    collectives: Collectives, path: str, values: Values, shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Send the `values` that `shapes` names to every rank. **Collective** if there are any."""
    if not shapes:
        return {}
    with collectives.call(_WHAT, path) as call:
        call.agree("values without an object", *shapes)
        return {name: broadcast_array(call, values, name, shape) for name, shape in shapes.items()}


def _load_state(collectives: Collectives, restoration: Restoration, tree: Tree) -> StateLoading:
    """Fill the user's own objects first: only these can still refuse their state."""
    loading = restoration.loading(tree)
    try:
        with collectives.common_outcome(_WHAT, restoration.path):
            loading.load()
    # If one rank's object refuses, all ranks raise, so every rank restores the old states of its
    # objects.
    except Exception:
        loading.undo()
        raise
    return loading
