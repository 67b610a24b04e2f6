"""Save a tree of objects: all ranks bring their values, rank 0 makes the file."""

from __future__ import annotations

import logging
import os
import time

from mpistrat.checkpoint.gathering import Gathering
from mpistrat.checkpoint.parallel_writing import ParallelWriting
from mpistrat.checkpoint.root_file import file_of_root
from mpistrat.spans import spanned
from mpistrat.tracking import Trackable

__all__ = ["save"]

_WHAT = "Checkpoint.write"
_logger = logging.getLogger("mpistrat")


@spanned("checkpoint", _WHAT)
def save(
    root: Trackable, path: str | os.PathLike[str], step: int = -1, parallel: bool = False
) -> str:
    """Write the state below `root` to `path`, and return it as a string. **Collective**.

    Variables travel one at a time to rank 0. Where `parallel`, what all ranks hold does not
    travel: each rank writes some of it.
    """
    began_s = time.perf_counter()
    gathering = Gathering(root, _WHAT, path, parallel)
    ranks, target = gathering.ranks, gathering.path
    with file_of_root(ranks, _WHAT, target, gathering.header(step)) as file:
        if parallel:
            writing = ParallelWriting(file, target)
            writing.take(gathering.items())
            writing.write(ranks, _WHAT)
        else:
            file.attempt_each(file.write, gathering.items())
    if ranks.rank == 0:
        _logger.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - began_s)
    return target
