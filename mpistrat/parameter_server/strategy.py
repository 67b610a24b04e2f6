"""ParameterServerStrategy: a chief with its workers, and servers that hold variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.arguments import as_integer
from mpistrat.errors import LaunchError
from mpistrat.mpi.world import World
from mpistrat.parameter_server.server_extended import ServerExtended
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.mpi import MPIStrategy

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.collectives.collectives import Collectives
    from mpistrat.layout import Layout


class ParameterServerStrategy(MPIStrategy):
    """Asynchronous work: a chief schedules closures on workers, which share variables.

    Rank 0 is the chief, the ranks 1 .. `num_ps` hold the variables ("ps"), and the others are
    workers; ``cluster_resolver.task_type`` says which this one is. Without servers the chief holds
    the variables. All ranks make the variables; then the chief makes a
    `mpistrat.coordinator.ClusterCoordinator`, and all others call `serve`. One rank alone is
    everything.

    A read of a variable gives it as it is at one moment, and a write is exact; but between a read
    and a write, other workers write too. See the guide's page on asynchronous work.

    **Collective** over `comm`. Starts MPI if the program has not.

    Parameters
    ----------
    num_ps : int
        The number of servers.
    variable_partitioner : callable, optional
        As for `MPIStrategy`. The parts of a variable lie on the servers in turn.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; by default COMM_WORLD. A private duplicate is used.

    Raises
    ------
    TypeError, ValueError
        If `num_ps` is no integer, or negative; on every rank.
    LaunchError
        If there are fewer than ``num_ps + 2`` ranks, where `num_ps` is above 0.

    Examples
    --------
    >>> import math
    >>> servers = ms.ParameterServerStrategy()
    >>> with servers.scope():
    ...     weight = ms.Variable(np.zeros(2), name="weight")
    >>> servers.barrier()  # while all ranks act together
    >>> servers.broadcast_object("hello"), servers.gather_objects(1) == [1] * servers.size
    ('hello', True)
    >>> weight.device
    '/job:chief/replica:0/task:0/device:CPU:0'
    >>> if servers.cluster_resolver.task_type == "chief":
    ...     coordinator = ms.coordinator.ClusterCoordinator(servers)
    ...     roots = [coordinator.schedule(math.sqrt, (number,)) for number in (4.0, 9.0)]
    ...     coordinator.join()
    ...     print(coordinator.fetch(roots))
    ...     servers.close()
    ... else:
    ...     servers.serve()
    [2.0, 3.0]
    """

    _extended_class = ServerExtended

    def __init__(
        self,
        num_ps: int = 0,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self._num_ps = num_ps
        super().__init__(comm, "cpu", None, variable_partitioner)
        extended, everyone = self._server_extended, self._cluster_resolver
        with extended._group.call("ParameterServerStrategy") as call:
            call.agree(f"num_ps={num_ps}")
        extended._start(self._num_ps, self._world)
        task_type, task_id = extended._role_of(self.rank)
        self._cluster_resolver = ClusterResolver(
            task_id=task_id,
            num_workers=max(1, self.size - 1 - self._num_ps),
            local_rank=everyone.local_rank,
            hosts=everyone.hosts,
            launcher=everyone.launcher,
            task_type=task_type,
        )

    def _check_world(self, world: World) -> None:
        self._world = world
        self._num_ps = as_integer("ParameterServerStrategy: num_ps", self._num_ps, 0)
        if self._num_ps and world.size < self._num_ps + 2:
            raise LaunchError(
                f"ParameterServerStrategy(num_ps={self._num_ps}) needs a chief, {self._num_ps} "
                f"server(s) and at least one worker, so {self._num_ps + 2} ranks, but "
                f"{world.size} were started. Start more, or take fewer servers."
            )

    @property
    def _server_extended(self) -> ServerExtended:
        extended = self._extended
        assert isinstance(extended, ServerExtended)
        return extended

    @property
    def _collectives(self) -> Collectives:
        return self._server_extended._group

    @property
    def _layout(self) -> Layout:
        return self._collectives.layout

    @property
    def is_fault_tolerant(self) -> bool:
        """Whether it is proved that the job survives the death of a worker. Local.

        It does with Open MPI's ``mpiexec --with-ft ulfm``.
        """
        return self._server_extended._is_tolerant

    def serve(self) -> None:
        """Work for the chief: run closures, or hold variables. Not on the chief.

        **Collective** with the chief's `mpistrat.coordinator.ClusterCoordinator`.
        Returns when the chief has called `close`, or its program has ended. The strategy is closed
        then.

        Raises
        ------
        ContextError
            On the chief, inside a closure, or inside a scope.
        RuntimeError
            If the strategy is closed.
        CollectiveError
            If the chief has failed; it reports that.
        """
        self._server_extended._serve()

    def close(self) -> None:
        """End the work of the other ranks, which return from `serve`. On the chief.

        **Collective** with their `serve`.
        Closures that wait are cancelled, and those that run finish first. Everything is freed. On
        another rank it does nothing after `serve`, and is `serve` before.
        """
        super().close()

    def barrier(self) -> None:
        """Return when every rank has made this call, before `serve`. **Collective**."""
        self._server_extended._require_setup("barrier")
        super().barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of rank `root`, before `serve`. **Collective**."""
        self._server_extended._require_setup("broadcast_object")
        return super().broadcast_object(obj, root)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all ranks, before `serve`. **Collective**."""
        self._server_extended._require_setup("gather_objects")
        return super().gather_objects(obj)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "A ParameterServerStrategy cannot be copied: its ranks serve one chief. Make another "
            "one on every rank."
        )

    def __repr__(self) -> str:
        task_type, task_id = self._server_extended._role_of(self.rank)
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, {task_type} {task_id}>"
