"""Extended part of the parameter-server strategy: roles, places of variables, phases of the job."""

from __future__ import annotations

import contextlib
import enum
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mpistrat import context
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CollectiveError, ContextError, UnavailableError
from mpistrat.failures import losses
from mpistrat.mpi.survival import FLAG
from mpistrat.mpi.world import World
from mpistrat.parameter_server.client import ParameterClient
from mpistrat.parameter_server.remote_step import (
    apply_remotely,
    find_slots,
    slot_makers,
    take_step,
)
from mpistrat.parameter_server.store import ParameterStore, Request
from mpistrat.strategies.groups import RankGroups
from mpistrat.system import exit_hooks

if TYPE_CHECKING:
    from mpistrat.data.distributed_dataset import DistributedDataset


from collections.abc import Iterator

from mpistrat.parameter_server.client import Part
from mpistrat.parameter_server.remote_variable import RemoteShardedVariable, RemoteVariable
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.variables import Variable
from mpistrat.variables.placement import Remote, Whole


class Phase(enum.Enum):
    """The phases of a parameter-server job."""

    SETUP = "all ranks make variables"
    SERVING = "the chief schedules, and the others serve"
    CLOSED = "it is over"


class Roles(Protocol):
    """What the ranks do after the setup, which a higher layer knows."""

    def serve(self, extended: ServerExtended) -> list[int]:
        """Work for the chief until its end, and return the ranks that are lost."""

    def end(self, extended: ServerExtended) -> list[int]:
        """Have all other ranks return from `serve`, and return those that are lost."""

    def fail(self, extended: ServerExtended) -> None:
        """Have all other ranks leave, because the chief has failed."""


class _Registry:
    load: Callable[[], Roles]


def load_roles_by(load: Callable[[], Roles]) -> None:
    """Have `load` give what the ranks do, once it is needed."""
    _Registry.load = staticmethod(load)


class ServerExtended(StrategyExtended):
    """Places variables on ranks. What acts on replicas sees a world of one, this rank's."""

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
        self._phase = Phase.SETUP
        self._store = ParameterStore()
        self._store.take_step = self._take_step
        self._optimizers: list[Any] = []
        self._closure_depth = 0
        """Above 0 while this rank runs a closure."""
        self._pump: Callable[[], object] | None = None
        """What the chief does for others whenever it can."""
        self._unavailable: UnavailableError | None = None
        """Why nothing can be scheduled any more."""
        self._coordinator: Any = None
        self._has_warned = False

    def _start(self, num_ps: int, world: World) -> None:
        """Take the role of this rank. **Collective**."""
        from mpistrat.comm.messages import BackOff, Messenger  # which needs an MPI library

        self._divide_roles(num_ps, world)
        rank, size = self._group.rank, self._group.size
        with self._group.call("ParameterServerStrategy") as call:
            call.agree("messages")
            with call.communicator() as comm:
                self._messages = Messenger(comm)
                self._is_tolerant = size > 1 and losses.has_proven_tolerance(comm)
        self._group.on_close["messages"] = self._messages.free
        mates = len(world.ranks_of_node)
        self._back_off = BackOff(shares_core=mates > world.num_cores)
        self._client = ParameterClient(
            self._messages,
            self._store,
            self._before_request,
            self._describe_loss,
            self._check_peers,
            self._back_off,
        )
        self._group.channel.departures.listener = self._on_departure
        if rank == 0:
            _end_with_program(self)

    def _check_may_make_variable(self, name: str) -> None:
        if self._phase is Phase.SERVING:
            raise ValueError(
                f"The variable {name!r} cannot be made any more, as the ranks serve: all of them "
                "must know every variable. Make it on every rank before serve() and the "
                "ClusterCoordinator; a function that runs on one worker alone may use arrays."
            )
        self._require_setup(f"making the variable {name!r}")

    def _require_setup(self, what: str) -> None:
        """Make sure that all ranks still act together."""
        if self._phase is Phase.SETUP:
            return
        if self._phase is Phase.CLOSED:
            self._collectives.channel.check_open()
        raise ContextError(
            f"{what} needs all ranks, but the others serve the chief of {self._container!r}. Call "
            "it before serve() and the ClusterCoordinator."
        )

    def _note_optimizer(self, optimizer: Any) -> None:
        if optimizer.sharded_slots or optimizer.loss_scale is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__}: sharded_slots and loss_scale are for replicas that "
                "step together. Under ParameterServerStrategy slots lie with their variable."
            )
        # They are known by their numbers.
        with self._group.call(type(optimizer).__name__) as call:
            call.agree()
        self._optimizers.append(optimizer)

    def _take_step(self, store: ParameterStore, request: Request) -> None:
        take_step(self._optimizers[request.key], request.key, store, request)

    _apply_gradients = staticmethod(apply_remotely)

    def _slot_makers(self, optimizer: Any) -> Mapping[str, Callable[[Any], Variable]]:
        """Return what makes the slots of a variable as this rank knows them, by name."""
        return slot_makers(optimizer, self)

    def _find_slots(self, optimizer: Any) -> Sequence[tuple[str, Variable, Variable]]:
        """Return name, slot and variable of each slot that the holders have by now."""
        return find_slots(optimizer, self)

    def _is_answered(self) -> bool:
        """Return whether requests have an answer now, without waiting for others to serve."""
        return self._phase is Phase.SERVING or tuple(self._holders) == (self._group.rank,)

    # Functions and data

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._closure_depth and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "strategy.run outside of a closure runs on this rank alone. Schedule a function "
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
        if not self._closure_depth:
            raise ValueError(
                "A data set of ParameterServerStrategy is iterated by the workers: pass "
                "coordinator.create_per_worker_dataset(function) to closures, and call "
                "next(iterator) there."
            )

    # Phases

    def _begin(self) -> None:
        """Wait until all other ranks serve. **Collective**."""
        if self._phase is Phase.SETUP:
            with self._group.call("serve") as call:
                call.agree()
            self._phase = Phase.SERVING
            if self._group.size > 1 and self._group.rank == 0 and not self._is_tolerant:
                losses.warn_of_intolerance()

    def _serve(self) -> None:
        """Do the work of a rank that is not the chief: see `ParameterServerStrategy.serve`."""
        context.require_cross_replica(self._container, "serve")
        if self._group.rank == 0:
            raise ContextError(
                "serve() is for servers and workers, and this is the chief: make "
                "ms.coordinator.ClusterCoordinator(strategy) here, and schedule closures."
            )
        if self._phase is Phase.SERVING:
            raise ContextError("serve() was called inside of a closure, which it runs itself.")
        if context.current() is not None:
            raise ContextError("Call serve() outside of every scope.")
        self._begin()
        lost = _Registry.load().serve(self)
        self._free(lost)

    def _close(self) -> None:
        """End the work of all ranks: see `ParameterServerStrategy.close`."""
        if self._phase is Phase.CLOSED:
            return
        context.require_cross_replica(self._container, "close")
        if self._closure_depth:
            raise ContextError("close() was called inside of a closure. Call it on the chief.")
        if self._group.rank:
            self._serve()
            return
        self._begin()
        self._free(_Registry.load().end(self))

    def _free(self, lost: Sequence[int]) -> None:
        """Free everything; where ranks are lost, leave that to the end of the process."""
        self._phase = Phase.CLOSED
        error = RuntimeError(
            f"{self._container!r} was closed by close(), so its variables are gone and it cannot "
            "be used any more. Read what is needed before."
        )
        if lost:
            losses.leave_out(self._group.channel, lost)
            self._group.abandon()
        else:
            self._group.channel.departures.listener = bool
            self._group.close(error)
        self._groups.close(error)
        self._collectives.close(error)
        self._store.clear()
        self._pump = None

    # Requests

    def _check_may_save(self, what: str) -> None:
        if self._group.rank:
            raise ContextError(
                f"{what} is for the chief alone here, which asks the servers. Call it where "
                'strategy.cluster_resolver.task_type == "chief".'
            )

    def _before_request(self, what: str, needs_others: bool) -> None:
        """Refuse a request that cannot be answered, and have the others ready for one that can."""
        if self._phase is Phase.CLOSED:
            self._collectives.channel.check_open()
        if self._group.rank == 0:
            if needs_others:
                # The other ranks answer only while they serve, so the first such request waits for
                # that.
                self._begin()
            if self._pump is not None:
                # Workers may wait for the chief, for a closure or for a variable that it holds.
                self._pump()
        elif self._phase is Phase.SETUP:
            raise ContextError(
                f"{what} on {self._name_of_rank(self._group.rank)} needs the rank that holds the "
                "variable, which answers once it serves. Do it in a closure, or on the chief."
            )

    def _describe_loss(self, rank: int) -> UnavailableError:
        """Return the error where a rank is lost that this one needs."""
        if rank == 0:
            self._leave_without_chief()
        names = ", ".join(self._names_of_holder.get(rank, ())) or "none"
        return UnavailableError(
            f"The {self._name_of_rank(rank)} is lost, and with it the variables {names}. Start the "
            "job again from a checkpoint."
        )

    def _check_peers(self) -> None:
        """Leave where the chief is lost, or anyone in a job that cannot go on without."""
        lost = self._group.channel.departures.lost()
        if self._is_tolerant and self._group.channel.is_reported:
            # MPI_Abort of Open MPI ends no other rank of a job that outlives losses.
            losses.leave_without(min(lost, default=0), "", is_first=False)
        if not lost:
            return
        if self._is_tolerant:
            if 0 in lost and self._group.rank:
                self._leave_without_chief()
            return
        rank = min(lost)
        losses.leave_without(
            rank,
            f"is lost: {lost[rank]}. The job ends; started with Open MPI's {FLAG}, it would "
            "go on without a worker.",
            is_first=self._is_first_of_the_rest(lost),
        )

    def _whereabouts(self, rank: int) -> str:
        """Return where the program of another rank is."""
        peers = self._group.channel.peers
        return "somewhere" if peers is None else peers.describe_rank(rank)

    def _is_first_of_the_rest(self, lost: Any) -> bool:
        rest = (rank for rank in range(self._group.size) if rank not in lost)
        return next(rest, -1) == self._group.rank

    def _leave_without_chief(self) -> None:
        lost = {0, *self._messages.lost, *self._group.channel.departures.lost()}
        losses.leave_without(
            0,
            "is lost, which was the chief. The others cannot go on. Start the job again from a "
            "checkpoint.",
            is_first=self._is_first_of_the_rest(lost),
        )

    def _on_departure(self, rank: int) -> None:
        """Leave a closure that runs on without the chief, from the monitor's thread."""
        if rank == 0 and self._is_tolerant and self._closure_depth:
            self._leave_without_chief()

    # Placement of variables: which rank holds what

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

    def _kind_of_variable(self, initial: Any, on_read: bool) -> tuple[type[Variable], type[Whole]]:
        is_cut = initial.is_cut_by(None if on_read else self._variable_partitioner)
        return RemoteShardedVariable if is_cut else RemoteVariable, Remote

    def _note_variable(self, variable: Any) -> None:
        self._variables.append(variable)

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


_chiefs: weakref.WeakSet[ServerExtended] = weakref.WeakSet()


def _end_with_program(extended: ServerExtended) -> None:
    """Have the other ranks return from `serve` when the program of the chief ends."""
    if not _chiefs:
        exit_hooks.at(exit_hooks.Phase.FAILED, lambda failure: _fail_all())
        exit_hooks.at(exit_hooks.Phase.BEFORE_LAST_ROUND, _end_all)
    _chiefs.add(extended)


def _fail_all() -> None:
    for each in list(_chiefs):
        if each._phase is Phase.SERVING:
            _Registry.load().fail(each)
        # So that `_end_all`, which runs later, does not wait for ranks that have left.
        each._phase = Phase.CLOSED


def _end_all() -> None:
    for each in list(_chiefs):
        if each._group.size == 1 or each._group.channel.closed is not None:
            continue
        # Another rank may have left without a word to the chief: its own report says so.
        with contextlib.suppress(CollectiveError):
            each._close()
