"""ParameterServerStrategy: a chief schedules work on workers, and servers hold variables."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat import context
from mpistrat.arguments import as_integer
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import ContextError, LaunchError
from mpistrat.layout import Layout
from mpistrat.mpi.world import World
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.parameter_server.remote_step import (
    apply_remotely,
    find_slots,
    slot_makers,
    take_step,
)
from mpistrat.parameter_server.remote_variable import (
    RemoteShardedVariable,
    RemoteVariable,
    parts_of,
)
from mpistrat.parameter_server.server_job import Phase, ServerJob, job_of
from mpistrat.parameter_server.store import ParameterStore, Request
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.strategies.rank_groups import RankGroups
from mpistrat.system.text import counted
from mpistrat.variables import Variable
from mpistrat.variables.placement import Remote, Whole

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.data.distributed_dataset import DistributedDataset


class ServerExtended(StrategyExtended):
    """Extended interface of the strategy: places variables on ranks.

    Methods that act on replicas see a single replica, this rank.
    """

    _is_remote = True

    def __init__(self, collectives: Collectives, groups: RankGroups | None = None) -> None:
        # Methods that act on replicas see a single replica.
        super().__init__(Collectives.solo(collectives.device))
        self._job = ServerJob(collectives)
        self._job.store.take_step = self._take_step
        self._partitioner: Callable[..., Sequence[int]] | None = None
        self._has_warned = False

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer.sharded_slots or optimizer.loss_scale is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}: sharded_slots and loss_scale are for replicas that "
                "step together. Under ParameterServerStrategy the servers store the slots."
            )
        # Messages name optimizers by number, so all ranks must create them in the same order.
        with self._job.group.call(type(optimizer).__name__) as call:
            call.agree()
        self._job.optimizers.append(optimizer)

    def _take_step(self, store: ParameterStore, request: Request) -> None:
        take_step(self._job.optimizers[request.key], request.key, store, request)

    _apply_gradients = staticmethod(apply_remotely)

    def _slot_makers(self, optimizer: Optimizer) -> Mapping[str, Callable[[Any], Variable]]:
        """Return a function per slot name that creates this rank's view of a slot."""
        return slot_makers(optimizer, self._job)

    def _find_slots(self, optimizer: Optimizer) -> Sequence[tuple[str, Variable, Variable]]:
        """Return name, slot and variable of each slot that exists on the holders."""
        return find_slots(optimizer, self._job)

    def _is_answered(self) -> bool:
        """Return whether requests are answered now, without waiting until other ranks serve."""
        return self._job.is_answered()

    # Functions and data

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._job.closure_depth and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "strategy.run outside of a closure runs on this rank only. Schedule a function "
                "that calls it: coordinator.schedule(fn).",
                UserWarning,
                stacklevel=4,
            )
        return super()._run(fn, args, kwargs)

    def _merge(self, result: Any) -> Any:
        return result

    def _owned(self, dataset: DistributedDataset) -> DistributedDataset:
        owned = super()._owned(dataset)
        owned._check_context = self._check_may_iterate
        return owned

    def _check_may_iterate(self) -> None:
        if not self._job.closure_depth:
            raise ValueError(
                "The workers iterate over a dataset of ParameterServerStrategy: pass "
                "coordinator.create_per_worker_dataset(function) to closures, and call "
                "next(iterator) there."
            )

    # Phases

    def _serve(self) -> None:
        """Do the work of a rank that is not the chief: see `ParameterServerStrategy.serve`."""
        context.require_cross_replica(self._container, "serve")
        if self._job.group.rank == 0:
            raise ContextError(
                "serve() is for servers and workers, but this is the chief: create "
                "ms.coordinator.ClusterCoordinator(strategy) here, and schedule closures."
            )
        if self._job.phase is Phase.SERVING:
            raise ContextError("serve() was called inside of a closure, which it runs itself.")
        if context.current() is not None:
            raise ContextError("Call serve() outside of every scope.")
        self._free(self._job.serve())

    def _close(self) -> None:
        """End the work of all ranks: see `ParameterServerStrategy.close`."""
        if self._job.phase is Phase.CLOSED:
            return
        context.require_cross_replica(self._container, "close")
        if self._job.closure_depth:
            raise ContextError("close() was called inside of a closure. Call it on the chief.")
        if self._job.group.rank:
            self._serve()
            return
        self._free(self._job.end())

    def _free(self, lost: Sequence[int]) -> None:
        """Free everything. If ranks are lost, leave that to the end of the process."""
        error = RuntimeError(
            f"{self._container!r} was closed by close(), so its variables are gone and it cannot "
            "be used any more. Read what is needed before."
        )
        self._job.free(lost, error)
        self._groups.close(error)
        self._collectives.close(error)

    # Requests

    def _check_may_save(self, what: str) -> None:
        if self._job.group.rank:
            raise ContextError(
                f"{what} is for the chief only, which asks the servers. Call it if "
                'strategy.cluster_resolver.task_type == "chief".'
            )

    # Placement of variables on ranks

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Device strings of the servers, or of the chief if there are no servers. Local."""
        return tuple(map(self._job.device_of_rank, self._job.holders))

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Device string of each worker. Local."""
        return tuple(map(self._job.device_of_rank, self._job.workers))

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints: true on the chief. Local."""
        return self._job.group.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank reports progress: true on the chief. Local."""
        return self._job.group.rank == 0

    @property
    def _variable_partitioner(self) -> Callable[..., Sequence[int]] | None:
        return None if self._job.beside is not None else self._partitioner

    @_variable_partitioner.setter
    def _variable_partitioner(self, partitioner: Callable[..., Sequence[int]] | None) -> None:
        self._partitioner = partitioner

    def _kind_of_variable(self, initial: Any, on_read: bool) -> tuple[type[Variable], type[Whole]]:
        is_cut = initial.is_cut_by(None if on_read else self._variable_partitioner)
        return RemoteShardedVariable if is_cut else RemoteVariable, Remote

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: Variable | tuple[str, ...]
    ) -> Iterator[None]:
        """Place variables of the ``with`` block on the server of a given variable. Local.

        They are not divided into parts. Raises `ValueError` if `colocate_with_variable` is not a
        variable of this strategy, and `ContextError` outside the scope of the strategy.
        """
        self._require_scope("colocate_vars_with")
        self._check_locality("colocate_vars_with", colocate_with_variable)
        outer = self._job.beside
        if isinstance(colocate_with_variable, RemoteVariable):
            self._job.beside = parts_of(colocate_with_variable)[0].holders
        try:
            yield
        finally:
            self._job.beside = outer


class ParameterServerStrategy(MPIStrategy):
    """Strategy for asynchronous work: a chief schedules closures on workers that share variables.

    Rank 0 is the chief, ranks 1 to `num_ps` are the servers ("ps"), which hold the variables, and
    all other ranks are workers; ``cluster_resolver.task_type`` is the role of this rank. Without
    servers, the chief holds the variables. All ranks create the variables. Then the chief creates a
    `mpistrat.coordinator.ClusterCoordinator`, and all other ranks call `serve`. A single rank
    schedules and runs everything itself.

    A read returns the value of a variable at one moment, and each write is exact. But other workers
    may write between a read and a write. See the guide's page on asynchronous work.

    **Collective** over `comm`. Starts MPI if the program has not.

    Parameters
    ----------
    num_ps : int
        Number of servers, the same on all ranks. Default: 0.
    variable_partitioner : callable, optional
        As for `MPIStrategy`. The parts of a variable are placed on the servers in turn.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part. The strategy uses a private duplicate. Default: COMM_WORLD.

    Raises
    ------
    TypeError, ValueError
        If `num_ps` is not an integer, or is negative; on every rank.
    LaunchError
        If `num_ps` is above 0 and there are fewer than ``num_ps + 2`` ranks.

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

    _extended: ServerExtended
    _extended_class = ServerExtended

    def __init__(
        self,
        num_ps: int = 0,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self._num_ps = num_ps
        super().__init__(comm, "cpu", None, variable_partitioner)
        job, everyone = job_of(self), self._cluster_resolver
        with job.group.call("ParameterServerStrategy") as call:
            call.agree(f"num_ps={num_ps}")
        job.start(self, self._num_ps, self._world)
        task_type, task_id = job.role_of(self.rank)
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
                f"ParameterServerStrategy(num_ps={self._num_ps}) needs a chief, "
                f"{counted(self._num_ps, 'server')} and at least one worker, so {self._num_ps + 2} "
                f"ranks, but {world.size} were started. Start more ranks or use fewer servers."
            )

    @property
    def _collectives(self) -> Collectives:
        return job_of(self).group

    @property
    def _layout(self) -> Layout:
        return self._collectives.layout

    @property
    def is_fault_tolerant(self) -> bool:
        """Whether the job has been tested to survive the death of a worker. Local.

        It survives under Open MPI's ``mpiexec --with-ft ulfm``.
        """
        return job_of(self).is_tolerant

    def serve(self) -> None:
        """Run closures for the chief, or hold variables. Not on the chief.

        **Collective** with the chief's `mpistrat.coordinator.ClusterCoordinator`.
        It returns when the chief has called `close`, or the chief's program has ended. The strategy
        is then closed.

        Raises
        ------
        ContextError
            If it is called on the chief, inside a closure, or inside a scope.
        RuntimeError
            If the strategy is closed.
        CollectiveError
            If the chief has failed. The chief reports its failure itself.
        """
        self._extended._serve()

    def close(self) -> None:
        """Make the other ranks return from `serve`, and free everything. On the chief.

        **Collective** with the `serve` of the other ranks.
        Waiting closures are cancelled, and running ones finish first. On a rank that is not the
        chief, `close` calls `serve` if the rank has not served yet; after that it does nothing.
        """
        super().close()

    def barrier(self) -> None:
        """Return when every rank has made this call, before `serve`. **Collective**."""
        job_of(self).require_setup("barrier")
        super().barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of rank `root`. Only before `serve`. **Collective**.

        Parameters
        ----------
        obj : object
            The object to send, which must be picklable. Only the object of rank `root` counts.
        root : int
            The rank that sends its object, the same on all ranks. Default: 0.

        Returns
        -------
        object
            A copy of the object.
        """
        job_of(self).require_setup("broadcast_object")
        return super().broadcast_object(obj, root)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all ranks. Only before `serve`. **Collective**.

        Parameters
        ----------
        obj : object
            The object of this rank, which must be picklable.

        Returns
        -------
        list
            One object per rank, in rank order.
        """
        job_of(self).require_setup("gather_objects")
        return super().gather_objects(obj)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "A ParameterServerStrategy cannot be copied: its ranks serve one chief. Create "
            "a second one on every rank."
        )

    def __repr__(self) -> str:
        task_type, task_id = job_of(self).role_of(self.rank)
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, {task_type} {task_id}>"
