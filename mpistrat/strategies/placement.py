"""Placement of variables on servers, in turn, and the roles of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpistrat.collectives.collectives import Collectives
from mpistrat.mpi.world import World
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.groups import RankGroups
from mpistrat.variables import Variable
from mpistrat.variables.parameter_client import Part
from mpistrat.variables.remote import RemoteVariable


class VariablePlacement(StrategyExtended):
    """Knows which rank does what, and which holds what. Equal on all ranks."""

    _is_remote = True

    def __init__(self, collectives: Collectives, groups: RankGroups | None = None) -> None:
        # What acts on replicas sees a world of one.
        super().__init__(Collectives.solo(collectives.device))
        self._group = collectives
        """Of all ranks, for the setup."""
        self._num_ps = 0
        self._world: World
        self._workers: list[int] = []
        """The ranks that run closures."""
        self._partitioner: Callable[..., Sequence[int]] | None = None
        self._beside: RemoteVariable | None = None
        """What new variables are colocated with."""
        self._variables: list[RemoteVariable] = []
        """In the order of creation, by which messages number them."""
        self._names_of_holder: dict[int, dict[str, None]] = {}
        self._num_parts = 0
        self._turn = 0

    def _divide_roles(self, num_ps: int, world: World) -> None:
        """Give each rank its role."""
        self._num_ps, self._world = num_ps, world
        self._workers = [*range(1 + num_ps, world.size)] if world.size > 1 else [0]

    def _role_of(self, rank: int) -> tuple[str, int]:
        """Return the task type of a rank, and its number among those of that type."""
        if rank == 0:
            return "chief", 0
        if rank <= self._num_ps:
            return "ps", rank - 1
        return "worker", rank - 1 - self._num_ps

    def _device_of_rank(self, rank: int) -> str:
        task_type, task_id = self._role_of(rank)
        return f"/job:{task_type}/replica:0/task:{task_id}/device:CPU:0"

    def _name_of_rank(self, rank: int) -> str:
        """Return how messages call a rank."""
        task_type, task_id = self._role_of(rank)
        kind = {"ps": "server", "worker": "worker", "chief": "chief"}[task_type]
        host = self._world.hosts[self._world.node_of_rank[rank]]
        return f"{kind} {task_id} (rank {rank} on {host})"

    @property
    def _holders(self) -> Sequence[int]:
        """The ranks that hold variables."""
        return range(1, 1 + self._num_ps) if self._num_ps else (0,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device strings of the servers, or of the chief where there are none. Local."""
        return tuple(map(self._device_of_rank, self._holders))

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device string of each worker. Local."""
        return tuple(map(self._device_of_rank, self._workers))

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints: true on the chief. Local."""
        return self._group.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank reports progress: true on the chief. Local."""
        return self._group.rank == 0

    @property
    def _variable_partitioner(self) -> Callable[..., Sequence[int]] | None:
        return None if self._beside is not None else self._partitioner

    @_variable_partitioner.setter
    def _variable_partitioner(self, partitioner: Callable[..., Sequence[int]] | None) -> None:
        self._partitioner = partitioner

    def _kind_of_variable(self, initial: Any, on_read: bool) -> str:
        is_cut = initial.is_cut_by(None if on_read else self._variable_partitioner)
        return "remote sharded" if is_cut else "remote"

    def _placed(self, name: str, ranges: Sequence[range], is_everywhere: bool) -> tuple[Part, ...]:
        """Return the parts of a new variable with these rows. Equal on all ranks."""
        parts = []
        for rows in ranges:
            if self._beside is not None:
                holders = self._beside._parts[0].holders
            else:
                holders = (self._holders[self._turn % len(self._holders)],)
                self._turn += 1
            if is_everywhere:
                first = holders[0]
                holders = (first, *[each for each in self._holders if each != first])
            parts.append(Part(self._num_parts, rows, holders))
            self._names_of_holder.setdefault(holders[0], {})[name] = None
            self._num_parts += 1
        return tuple(parts)

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: Variable | tuple[str, ...]
    ) -> Iterator[None]:
        """Make variables on the server of another one, whole, within the ``with`` block. Local.

        Raises `ValueError` for what is no variable of this strategy, `ContextError` outside its
        scope.
        """
        self._require_scope("colocate_vars_with")
        self._check_locality("colocate_vars_with", colocate_with_variable)
        outer = self._beside
        if isinstance(colocate_with_variable, RemoteVariable):
            self._beside = colocate_with_variable
        try:
            yield
        finally:
            self._beside = outer
