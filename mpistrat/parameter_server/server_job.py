"""State of a parameter-server job on one rank: roles, phases, lost ranks, holders of variables."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mpistrat import context
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CollectiveError, ContextError, UnavailableError
from mpistrat.failures import losses
from mpistrat.mpi.survival import FLAG
from mpistrat.mpi.world import World
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.parameter_server.store import ParameterClient, ParameterStore, Part
from mpistrat.system import exit_hooks

if TYPE_CHECKING:
    from mpistrat.comm.messages import BackOff, Messenger


class Phase(enum.Enum):
    """Phases of a parameter-server job."""

    SETUP = "all ranks make variables"
    SERVING = "the chief schedules, and the others serve"
    CLOSED = "it is over"


class Roles(NamedTuple):
    """Functions for the time after the setup. A higher layer sets them."""

    serve: Callable[[ServerJob], list[int]]
    """Works for the chief until the chief ends, and returns the lost ranks."""
    end: Callable[[ServerJob], list[int]]
    """Makes all other ranks return from `serve`, and returns the lost ranks."""
    fail: Callable[[ServerJob], None]
    """Makes all other ranks leave, because the chief has failed."""


class ServerJob:
    """State that a rank of a `ParameterServerStrategy` keeps about the job.

    The strategy, its extended interface, variables, optimizers and the coordinator all use it.
    """

    roles: ClassVar[Roles]
    messages: Messenger
    back_off: BackOff
    client: ParameterClient
    strategy: context.Strategy
    is_tolerant: bool
    """Whether the job survives the loss of a worker."""

    def __init__(self, group: Collectives) -> None:
        self.group = group
        """Collectives over all ranks, for the setup."""
        self._num_ps = 0
        self._world: World
        self.workers: list[int] = []
        """Ranks that run closures."""
        self.beside: tuple[int, ...] | None = None
        """Holders of the variable with which new variables are colocated."""
        self.variables: list[Any] = []
        """Variables in creation order. Messages name a variable by its index here."""
        self._names_of_holder: dict[int, dict[str, None]] = {}
        self._num_parts = 0
        self._turn = 0
        self.phase = Phase.SETUP
        self.store = ParameterStore()
        self.optimizers: list[Optimizer] = []
        """Optimizers in creation order. Messages name an optimizer by its index here."""
        self.closure_depth = 0
        """Above 0 while this rank runs a closure."""
        self.pump: Callable[[], object] | None = None
        """Function with which the chief answers other ranks; the chief calls it while it waits."""
        self.unavailable: UnavailableError | None = None
        """Error that says why no closure can be scheduled any more."""
        self.coordinator: Any = None

    def start(self, strategy: context.Strategy, num_ps: int, world: World) -> None:
        """Start the role of this rank. **Collective**."""
        from mpistrat.comm.messages import BackOff, Messenger  # needs an MPI library

        self.strategy = strategy
        self._num_ps, self._world = num_ps, world
        self.workers = [*range(1 + num_ps, world.size)] if world.size > 1 else [0]
        rank, size = self.group.rank, self.group.size
        with self.group.call("ParameterServerStrategy") as call:
            call.agree("messages")
            with call.communicator() as comm:
                self.messages = Messenger(comm)
                self.is_tolerant = size > 1 and losses.has_proven_tolerance(comm)
        self.group.on_close["messages"] = self.messages.free
        mates = len(world.ranks_of_node)
        self.back_off = BackOff(shares_core=mates > world.num_cores)
        self.client = ParameterClient(
            self.messages,
            self.store,
            self._before_request,
            self.describe_loss,
            self.check_peers,
            self.back_off,
        )
        self.group.channel.departures.listener = self._on_departure
        if rank == 0:
            _end_with_program(self)

    def check_may_make_variable(self, name: str) -> None:
        """Raise an error if a new variable would not be known on all ranks."""
        if self.phase is Phase.SERVING:
            raise ValueError(
                f"The variable {name!r} cannot be created after serve(), because all ranks must "
                "know every variable. Create it on every rank before serve() and before the "
                "ClusterCoordinator; a function that runs on only one worker can use arrays."
            )
        self.require_setup(f"creating the variable {name!r}")

    def require_setup(self, what: str) -> None:
        """Raise an error if the setup, in which all ranks act together, is over."""
        if self.phase is Phase.SETUP:
            return
        if self.phase is Phase.CLOSED:
            context.collectives_of(self.strategy).channel.check_open()
        raise ContextError(
            f"{what} needs all ranks, but the others serve the chief of {self.strategy!r}. Call "
            "it before serve() and the ClusterCoordinator."
        )

    def is_answered(self) -> bool:
        """Return whether requests are answered now, without waiting until other ranks serve."""
        return self.phase is Phase.SERVING or tuple(self.holders) == (self.group.rank,)

    # Phases

    def begin(self) -> None:
        """Wait until all other ranks serve. **Collective**."""
        if self.phase is Phase.SETUP:
            with self.group.call("serve") as call:
                call.agree()
            self.phase = Phase.SERVING
            if self.group.size > 1 and self.group.rank == 0 and not self.is_tolerant:
                losses.warn_of_intolerance()

    def serve(self) -> list[int]:
        """Work for the chief until the chief ends, and return the lost ranks."""
        self.begin()
        return self.roles.serve(self)

    def end(self) -> list[int]:
        """Make all other ranks return from `serve`, and return the lost ranks."""
        self.begin()
        return self.roles.end(self)

    def free(self, lost: Sequence[int], error: RuntimeError) -> None:
        """Free everything. If ranks are lost, leave that to the end of the process."""
        self.phase = Phase.CLOSED
        if lost:
            losses.leave_out(self.group.channel, lost)
            self.group.abandon()
        else:
            self.group.channel.departures.listener = bool
            self.group.close(error)
        self.store.clear()
        self.pump = None

    # Requests, and lost ranks

    def _before_request(self, what: str, needs_others: bool) -> None:
        """Raise an error if a request cannot be answered, or prepare for it.

        The chief first waits until the other ranks serve, if the request needs them.
        """
        if self.phase is Phase.CLOSED:
            context.collectives_of(self.strategy).channel.check_open()
        if self.group.rank == 0:
            if needs_others:
                # Other ranks answer only while they serve, so the first such request waits until
                # they do.
                self.begin()
            if self.pump is not None:
                # Workers may be waiting for a closure, or for a variable that the chief holds.
                self.pump()
        elif self.phase is Phase.SETUP:
            raise ContextError(
                f"{what} on {self.name_of_rank(self.group.rank)} needs the rank that holds the "
                "variable, which answers once it serves. Do it in a closure, or on the chief."
            )

    def describe_loss(self, rank: int) -> UnavailableError:
        """Return the error to raise for the loss of a rank that this one needs."""
        if rank == 0:
            self.leave_without_chief()
        names = ", ".join(self._names_of_holder.get(rank, ())) or "none"
        return UnavailableError(
            f"The {self.name_of_rank(rank)} is lost, and with it the variables {names}. Start the "
            "job again from a checkpoint."
        )

    def check_peers(self) -> None:
        """End this process if the chief is lost, or any rank in a job that survives no loss."""
        lost = self.group.channel.departures.lost()
        if self.is_tolerant and self.group.channel.is_reported:
            # In a job that survives losses, Open MPI's MPI_Abort does not end the other ranks.
            losses.leave_without(min(lost, default=0), "", is_first=False)
        if not lost:
            return
        if self.is_tolerant:
            if 0 in lost and self.group.rank:
                self.leave_without_chief()
            return
        rank = min(lost)
        losses.leave_without(
            rank,
            f"is lost: {lost[rank]}. The job ends. If you start it with Open MPI's {FLAG}, it "
            "continues without a lost worker.",
            is_first=self._is_first_of_the_rest(lost),
        )

    def whereabouts(self, rank: int) -> str:
        """Return, as text, where the program of another rank currently is."""
        peers = self.group.channel.peers
        return "somewhere" if peers is None else peers.describe_rank(rank)

    def _is_first_of_the_rest(self, lost: Any) -> bool:
        rest = (rank for rank in range(self.group.size) if rank not in lost)
        return next(rest, -1) == self.group.rank

    def leave_without_chief(self) -> None:
        """End this process, because the chief is lost."""
        lost = {0, *self.messages.lost, *self.group.channel.departures.lost()}
        losses.leave_without(
            0,
            "is lost. It was the chief, so the others cannot continue. Start the job again from a "
            "checkpoint.",
            is_first=self._is_first_of_the_rest(lost),
        )

    def _on_departure(self, rank: int) -> None:
        """End a process whose closure would run on without the chief. In the monitor's thread."""
        if rank == 0 and self.is_tolerant and self.closure_depth:
            self.leave_without_chief()

    # Roles, and holders of variables

    def role_of(self, rank: int) -> tuple[str, int]:
        """Return the task type of a rank, and its number among the ranks of that type."""
        if rank == 0:
            return "chief", 0
        if rank <= self._num_ps:
            return "ps", rank - 1
        return "worker", rank - 1 - self._num_ps

    def device_of_rank(self, rank: int) -> str:
        """Return the device string of a rank."""
        task_type, task_id = self.role_of(rank)
        return f"/job:{task_type}/replica:0/task:{task_id}/device:CPU:0"

    def name_of_rank(self, rank: int) -> str:
        """Return the name of a rank for messages to the user."""
        task_type, task_id = self.role_of(rank)
        kind = {"ps": "server", "worker": "worker", "chief": "chief"}[task_type]
        host = self._world.hosts[self._world.node_of_rank[rank]]
        return f"{kind} {task_id} (rank {rank} on {host})"

    @property
    def holders(self) -> Sequence[int]:
        """Ranks that hold variables."""
        return range(1, 1 + self._num_ps) if self._num_ps else (0,)

    def placed(self, name: str, ranges: Sequence[range], is_everywhere: bool) -> tuple[Part, ...]:
        """Return the parts of a new variable with these row ranges. Equal on all ranks."""
        parts = []
        for rows in ranges:
            if self.beside is not None:
                holders = self.beside
            else:
                holders = (self.holders[self._turn % len(self.holders)],)
                self._turn += 1
            if is_everywhere:
                first = holders[0]
                holders = (first, *[each for each in self.holders if each != first])
            parts.append(Part(self._num_parts, rows, holders))
            self._names_of_holder.setdefault(holders[0], {})[name] = None
            self._num_parts += 1
        return tuple(parts)


def job_of(strategy: context.Strategy) -> ServerJob:
    """Return the job of a `ParameterServerStrategy`."""
    job: ServerJob = strategy.extended._job
    return job


_chiefs: weakref.WeakSet[ServerJob] = weakref.WeakSet()


def _end_with_program(job: ServerJob) -> None:
    """Make the other ranks return from `serve` when the program of the chief ends."""
    if not _chiefs:
        exit_hooks.at(exit_hooks.Phase.FAILED, lambda failure: _fail_all())
        exit_hooks.at(exit_hooks.Phase.BEFORE_LAST_ROUND, _end_all)
    _chiefs.add(job)


def _fail_all() -> None:
    for each in list(_chiefs):
        if each.phase is Phase.SERVING:
            each.roles.fail(each)
        # Otherwise `_end_all`, which runs later, would wait for ranks that have left.
        each.phase = Phase.CLOSED


def _end_all() -> None:
    for each in list(_chiefs):
        if each.group.size == 1 or each.group.channel.closed is not None:
            continue
        # Another rank may have left without telling the chief. That rank reports its own error.
        with contextlib.suppress(CollectiveError):
            each.strategy.close()
