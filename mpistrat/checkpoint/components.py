"""Components of SyncOnRead variables in a checkpoint, for jobs with ``num_replicas=``.

The aggregate of a variable is enough to continue. Its components are needed for the same bits, as
they add up in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np

from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.variables import ReplicatedOnRead, Variable

Kept: TypeAlias = tuple[int, dict[int, np.ndarray]]
"""The number of replicas, and the components of some of them."""

_WHAT = "Checkpoint.restore"
_logger = logging.getLogger("mpistrat")


def read_components(
    collectives: Collectives,
    path: str,
    variables: Mapping[str, Variable],
    others: Collection[str],
) -> dict[str, np.ndarray | None]:
    """Return the components in a file of as many replicas, on rank 0, by path. **Collective**.

    `others` are the paths of variables that the program has not made yet. Their strategy may be
    unknown.
    """
    wanted = [name for name, each in variables.items() if isinstance(each, ReplicatedOnRead)]
    if not collectives.arithmetic and not (others and collectives.layout.num_replicas == 1):
        return {}  # a strategy without num_replicas=
    num_replicas = collectives.layout.num_replicas
    found: dict[str, np.ndarray] = {}

    def read() -> list[str]:
        with open_checkpoint(path) as reader:
            header = reader.header
            if collectives.arithmetic and header.arithmetic not in ("", collectives.arithmetic):
                _logger.warning(
                    "Checkpoint %s was written by ranks with other arithmetic (%s, here %s): from "
                    "here on the bits may differ from those of that job. Use the same type of CPU "
                    "and the same OPENBLAS_NUM_THREADS (mpistrat run: --threads).",
                    *(path, header.arithmetic, collectives.arithmetic),
                )
            is_fitting = header.num_replicas == num_replicas
            names = wanted if is_fitting else []
            if is_fitting or num_replicas == 1:
                names = [*names, *others]
            present = reader.replicas.keys() & set(names)
            found.update((name, reader.read_replicas(name)) for name in names if name in present)
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
        if name in variables:
            variable = variables[name]
            assert isinstance(variable, ReplicatedOnRead)
            values = _on_all(collectives, of_root, variable.shape, variable.dtype)
            variable._load_components(dict(enumerate(values)))


def keep_components(
    collectives: Collectives,
    components: Mapping[str, np.ndarray | None],
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
) -> dict[str, Kept]:
    """Return what this rank may need of the `components` that `shapes` names. **Collective**."""
    kept = {}
    for name, of_root in components.items():
        if name in shapes:
            values = _on_all(collectives, of_root, *shapes[name])
            # An elastic job may give any rank any replica before the variable is made.
            is_known = collectives.layout.num_replicas == len(values) and not collectives.is_elastic
            rows = collectives.layout.local_replicas if is_known else range(len(values))
            kept[name] = len(values), {row: values[row].copy() for row in rows}
    return kept


def load_kept(variable: Variable, kept: Kept | None) -> None:
    """Set the components of a variable that was made after the restore. Local."""
    if kept is None or not isinstance(variable, ReplicatedOnRead):
        return
    num_replicas, rows = kept
    extended = variable.strategy.extended
    has_all = rows.keys() >= set(extended.local_replica_ids)
    if extended._layout.num_replicas == num_replicas and has_all:
        variable._load_components(rows)


def _on_all(
    collectives: Collectives, of_root: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    values = of_root
    if values is None:
        values = np.empty((collectives.layout.num_replicas, *shape), dtype)
    with collectives.call(_WHAT) as call:
        received: np.ndarray = broadcast(call, values)
    return received
