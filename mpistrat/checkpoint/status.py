"""What became of a restore: which paths of the file and of the program met."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np

from mpistrat.checkpoint.objects import Tree, walk
from mpistrat.checkpoint.restoration import Restoration
from mpistrat.checkpoint.shapes import describe
from mpistrat.errors import _UnmatchedPathsError
from mpistrat.tracking import Trackable

__all__ = ["RestoreStatus", "check_nothing_missing"]

_logger = logging.getLogger("mpistrat")


class RestoreStatus:
    """The result of `Checkpoint.restore`.

    Paths of the file that no object has taken when the checkpoint object goes away are named
    in one warning of the logger ``mpistrat``, unless one of the methods here has been called.
    Until an object takes them, nothing can be saved, unless `expect_partial` has been called.
    """

    def __init__(self, root: Trackable, restoration: Restoration, warns: bool) -> None:
        self._root = root
        self._restoration = restoration
        self._warning = weakref.finalize(
            restoration, _warn_of_rest, restoration.path, restoration.arrays, restoration.state
        )
        if not warns:
            self._warning.detach()

    def assert_consumed(self) -> RestoreStatus:
        """Check that every path of the file and of the program has met its other half. Local.

        Raises
        ------
        CheckpointMismatchError
            If not (it is an AssertionError too); the message names all paths.
        """
        self._warning.detach()
        self._check(self._unexpected())
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that every object that the program has by now was in the file. Local.

        Raises
        ------
        CheckpointMismatchError
            If not (it is an AssertionError too); the message names all paths.
        """
        self._warning.detach()
        self._check([])
        return self

    def expect_partial(self) -> RestoreStatus:
        """Say that paths without a match are meant. Local.

        No warning comes, and objects may be saved while values wait for others, which are then
        not in the new file. Objects that are made later still get their values.
        """
        self._warning.detach()
        self._restoration.is_partial = True
        return self

    def _unexpected(self) -> list[str]:
        return [f"{path} ({of})" for path, of in self._restoration.left().items()]

    def _check(self, unexpected: list[str]) -> None:
        tree = walk(self._root.checkpoint_children())
        missing = _missing(tree, self._restoration.restored)
        _raise_unmatched(self._restoration.path, missing, unexpected)


def check_nothing_missing(path: str, tree: Tree, stored: set[str]) -> None:
    """Check that the file `path` with the paths `stored` has every object of `tree`. Local.

    Raises
    ------
    CheckpointMismatchError
        If not; the message names all paths.
    """
    _raise_unmatched(path, _missing(tree, stored), [])


def _missing(tree: Tree, present: set[str]) -> list[str]:
    lines = [
        f"{path} ({describe(variable.shape, variable.dtype)})"
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
