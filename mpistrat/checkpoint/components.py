"""Components of SyncOnRead variables in a checkpoint, for jobs with ``num_replicas=``.

The aggregate of a variable is enough to continue. Its components are needed for the same bits, as
they add up in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.variables import ReplicatedOnRead, Variable

__all__ = ["load_components", "read_components"]

_WHAT = "Checkpoint.restore"
_logger = logging.getLogger("mpistrat")


def read_components(
    collectives: Collectives, path: str, variables: Mapping[str, Variable]
) -> dict[str, np.ndarray | None]:
    """Return the components in a file of as many replicas, on rank 0, by path. **Collective**."""
    wanted = [name for name, each in variables.items() if isinstance(each, ReplicatedOnRead)]
    if not wanted:
        return {}
    found: dict[str, np.ndarray] = {}

    def read() -> list[str]:
        with open_checkpoint(path) as reader:
            header = reader.header
            if collectives.arithmetic and header.arithmetic not in ("", collectives.arithmetic):
                _logger.info(
                    "Checkpoint %s was written by ranks with other arithmetic (%s, here %s): from "
                    "here on the bits may differ from those of that job.",
                    *(path, header.arithmetic, collectives.arithmetic),
                )
            if header.num_replicas == collectives.layout.num_replicas:
                names = [name for name in wanted if name in reader.replica_paths]
                found.update((name, reader.read_replicas(name)) for name in names)
        return list(found)

    names = collectives.on_root(read, _WHAT, path)
    return {name: found.get(name) for name in names}


def load_components(
    collectives: Collectives,
    components: Mapping[str, np.ndarray | None],
    variables: Mapping[str, Variable],
) -> None:
    """Set each variable to the components that rank 0 has. **Collective**."""
    for name, of_root in components.items():
        variable = variables[name]
        assert isinstance(variable, ReplicatedOnRead)
        shape = (collectives.layout.num_replicas, *variable.shape)
        values = np.empty(shape, variable.dtype) if of_root is None else of_root
        variable._load_components(collectives.broadcast(values, kind=_WHAT))
