"""Go on from the newest checkpoint of a folder that is sound."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.checkpoint.folder import warn_of_damage
from mpistrat.checkpoint.restoring import restore
from mpistrat.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from mpistrat.tracking import Trackable

__all__ = ["restore_newest"]


def restore_newest(root: Trackable, directory: str, paths: Sequence[str]) -> str | None:
    """Restore the objects below `root` from the last of `paths` that is sound. **Collective**.

    A restore assigns all or nothing, so each file is tried, and read once.

    Parameters
    ----------
    root : Trackable
    directory : str
        For messages.
    paths : sequence of str
        Oldest first, equal on all ranks.

    Returns
    -------
    str or None
        The path of the file, ``None`` without any.

    Raises
    ------
    CheckpointError
        If there are checkpoints but none is sound: to start again in silence would lose what
        the program had reached, and later checkpoints would take the places of these.
    CheckpointMismatchError
        If the file does not have every object of the program, or others.
    """
    errors: list[CheckpointError] = []
    for path in reversed(paths):
        try:
            restore(root, path, allow_missing=False)
        except CheckpointMismatchError:
            raise
        except CheckpointError as error:
            if not getattr(error, "caused_elsewhere", False):
                warn_of_damage(error)
            errors.append(error)
        else:
            return path
    if not errors:
        return None
    corrupt = any(isinstance(error, CheckpointCorruptError) for error in errors)
    raise (CheckpointCorruptError if corrupt else CheckpointError)(
        f"The folder {directory} has checkpoints, but none of them can be restored:\n"
        + "\n".join(f"  {error}" for error in errors)
        + "\nPut a sound copy in place of one, or move these files away to start from the "
        "beginning."
    )
