"""Elastic job: the survivors undo and repeat the call in which a rank was lost (ULFM)."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.context import replica_set_of
from mpistrat.elastic.moved_replicas import ElasticReplicaSet
from mpistrat.elastic.state import ElasticState
from mpistrat.errors import CollectiveError, LaunchError
from mpistrat.failures.losses import leave_lost, outlive_losses
from mpistrat.mpi.survival import (
    FLAG,
    failed_ranks,
    failed_ranks_soon,
    is_revoked,
    revoke,
    why_not_tolerant,
)
from mpistrat.mpi.world import communicator
from mpistrat.options import CommunicationOptions
from mpistrat.system.callsite import call_site
from mpistrat.system.text import rank_list
from mpistrat.system.units import note_undos_by, on_undo

if TYPE_CHECKING:
    from mpi4py import MPI


_logger = logging.getLogger("mpistrat")

_END = "the end of the call"
_PATIENT_POLLS = 24
_LONG_S = 0.01
"""Seconds for which a wait polls without sleeping, because MPI does not wake waiting ranks."""
_REST_S = 0.0002


class ElasticJob:
    """The surviving ranks of this job, and the elastic strategies on them.

    A unit is one public collective call of the program, such as `Strategy.run`, with everything
    that happens inside it. At its end the ranks agree with ``MPIX_Comm_agree``, which returns the
    same result on all survivors. Either all ranks have completed the unit with the data of all
    ranks, or all undo it, reconnect without the lost ranks, and repeat it. So no rank is ever ahead
    of the others.
    """

    def __init__(self) -> None:
        self.state = ElasticState()
        self.is_in_unit = False
        self._comm: Any = None
        self.strategies: list[Any] = []
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_units = 0
        self._undos: list[Callable[[], object]] = []
        self.checks: list[Callable[[], object]] = []
        """Functions that are called once the unit is done, and may raise."""
        self.commits: list[Callable[[], object]] = []
        """Functions that are called once the unit is over."""
        self._flag = np.zeros(1, np.int32)
        self._agreement: MPI.Request | None = None
        """Request of the last agreement, which writes to the flag."""

    def open(
        self,
        strategy: Any,
        comm: MPI.Intracomm | None,
        num_replicas: int | None,
        make: Callable[[MPI.Intracomm], object],
    ) -> None:
        """Let `make` connect `strategy` to the surviving ranks. **Collective**."""
        if num_replicas is None:
            raise ValueError(
                "elastic=True needs num_replicas=, so that those that are left can compute the "
                "replicas of a lost rank."
            )
        if comm is not None:
            raise ValueError(
                "elastic=True cannot be combined with comm=, because the communicator becomes "
                "smaller with each loss. Leave comm out, so that all remaining ranks take part."
            )
        for other in self.strategies:
            if other.num_replicas_in_sync != num_replicas:
                raise ValueError(
                    f"elastic=True with num_replicas={num_replicas}, but there is {other!r}: all "
                    "elastic strategies of a job must have the same number of replicas."
                )
        if self._comm is None:
            comm = communicator(None)
            why = why_not_tolerant()
            if why and comm.size > 1:
                error = LaunchError(
                    f"elastic=True needs an MPI library that survives lost ranks, but {why}. Start "
                    f"the program with Open MPI's {FLAG}."
                )
                error._is_reported_elsewhere = comm.rank != 0
                raise error
            self._comm = comm
            outlive_losses()
            note_undos_by(self._note_undo)
        self.run(type(strategy).__name__, lambda: make(self._comm))
        self.strategies.append(strategy)

    def run(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Any] = False
    ) -> Any:
        """Call `function`, and call it again after a loss; return its result. **Collective**.

        `writes` lists the variables that it may write to, or says whether it may write to all.
        Only a function that may write may also return values of replicas.
        """
        if self.is_in_unit:
            return function()
        with self._unit():
            while True:
                copies = self.state.copy(writes)
                keep: Callable[[], object] = bool
                error = None
                try:
                    result = function()
                    for check in self.checks:
                        check()
                    if writes is True:
                        keep = self.state.share(self._ranks, what, result)
                    elif self.strategies:
                        self.state.meet(self._ranks, what)
                except Exception as raised:
                    # If it is an error of the program, on all ranks or not, repeating the call
                    # would not help.
                    if not self.is_loss(raised):
                        raise
                    error = raised
                # Every rank gets here, with or without an error. The results are kept only if all
                # ranks agree.
                if self._agree(error is None):
                    # Only after the agreement: before it, a rank might keep data that another rank
                    # never received, and the two would later restore different states.
                    keep()
                    for do in self.commits:
                        do()
                    return result
                result = error = None
                self._recover(what)
                self.state.restore(copies)

    @contextlib.contextmanager
    def _unit(self) -> Iterator[None]:
        self.is_in_unit = True
        self._num_units += 1
        try:
            yield
        finally:
            self.is_in_unit = False
            self._forget_actions()

    def _forget_actions(self) -> None:
        for each in (self._undos, self.checks, self.commits):
            each.clear()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context for collective calls that are never repeated."""
        is_in_unit, self.is_in_unit = self.is_in_unit, True
        try:
            yield
        finally:
            self.is_in_unit = is_in_unit

    def _note_undo(self, undo: Callable[[], object]) -> None:
        if self.is_in_unit:
            self._undos.append(undo)

    @property
    def _ranks(self) -> Any:
        return replica_set_of(self.strategies[0]).ranks

    def is_loss(self, error: BaseException) -> bool:
        """Return whether a lost rank caused `error`, as far as this rank knows. Local."""
        from mpi4py import MPI

        if not isinstance(error, CollectiveError | MPI.Exception):
            # Open MPI can return from a collective without an error although the data of a dead
            # rank are missing. Then any error of the program may be the consequence.
            return bool(failed_ranks(self._comm)) or is_revoked(self._comm)
        # The monitors may know before MPI does.
        channels = [replica_set_of(each).ranks.channel for each in self.strategies]
        if any(each.departures.lost() for each in channels):
            return True
        return bool(failed_ranks_soon(self._comm)) or is_revoked(self._comm)

    def _agree(self, is_well: bool) -> bool:
        """Return whether all ranks are alive and have no error. **Collective**."""
        from mpi4py import MPI

        if self._comm.size == 1:
            return is_well
        if not is_well:
            # Ranks that wait for this one inside the unit would never reach the agreement.
            self._revoke()
        # Ranks without an error have all completed the unit. A rank that is missing here must have
        # stopped since then.
        self._flag[0] = is_well
        try:
            self._agreement = self._comm.Iagree(self._flag)
            self._wait(self._agreement.Test)
        # If a rank has died, ULFM raises here on all survivors, so all undo the unit.
        except MPI.Exception:
            return False
        return bool(self._flag[0])

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns true, which it also does if ranks die, up to the time limit."""
        channel = self._ranks.channel if self.strategies else None
        limit_s = math.inf if channel is None or channel.timeout_s is None else channel.timeout_s
        began, turns = time.monotonic(), 0
        while not done():
            turns += 1
            if turns < _PATIENT_POLLS:
                continue
            waited_s = time.monotonic() - began
            if waited_s < _LONG_S:
                os.sched_yield()
                continue
            time.sleep(_REST_S)
            if channel is None:
                continue
            # So that ranks that ask see that this one is waiting and not computing.
            channel.waiting = (_END, began)
            if waited_s > limit_s:
                channel.stuck_at = call_site()  # this agreement stays open, like a round
                channel.give_up(_END, limit_s, is_last=True)
        if channel is not None:
            channel.waiting = None

    def _revoke(self) -> None:
        """Interrupt all ranks that wait in MPI."""
        revoke(self._comm)
        for strategy in self.strategies:
            replica_set_of(strategy).ranks.channel.transport.revoke()

    def _without_lost(self) -> Any:
        """Return a communicator of the surviving ranks. **Collective**."""
        return self._comm.Shrink()

    def _recover(self, what: str) -> None:
        """Undo the unit, and connect the surviving ranks. **Collective**."""
        from mpi4py import MPI

        began, before = time.monotonic(), self._comm
        # In reverse order, because later steps may depend on earlier ones.
        for undo in reversed(self._undos):
            undo()
        self._forget_actions()
        while True:
            self._revoke()
            # A rank may also die during the recovery. Then some rank fails below, all agree on
            # that, and all shrink again.
            self._comm = self._without_lost()
            is_well = True
            try:
                for strategy in self.strategies:
                    strategy._reopen(self._comm)
                of_ranks = self._comm.allgather((before.rank, self._num_units))
            except (CollectiveError, MPI.Exception) as error:
                if not self.is_loss(error):
                    raise
                is_well = False
            if self._agree(is_well):
                break
        for optimizer in self.optimizers:
            # Prepared steps hold reductions on the old transport.
            optimizer._prepared.clear()
        if len({number for _, number in of_ranks}) > 1:
            raise CollectiveError(
                f"The ranks that are left were not in one call when others were lost: {of_ranks}."
            )
        if self._comm.rank == 0:
            left = [rank for rank, _ in of_ranks]
            lost = [rank for rank in range(before.size) if rank not in left]
            _logger.warning(
                "lost %s of %d in %s at %s; %s continue as %d from the start of that call, after "
                "%.2f s",
                *(rank_list(lost), before.size, what, call_site(), rank_list(left), len(left)),
                time.monotonic() - began,
            )


job = ElasticJob()
"""The elastic job of this process."""


class ElasticCollectives(Collectives):
    """The collectives of an elastic strategy, each in a unit."""

    is_elastic = True
    replica_set = ElasticReplicaSet

    @property
    def needs_unit(self) -> bool:
        """Whether no unit is running."""
        return not job.is_in_unit

    def as_unit(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Any] = False
    ) -> Any:
        """Call `function`, and repeat it after a loss; return its result. **Collective**."""
        return job.run(what, function, writes)

    def at_end(self, check: Callable[[], object]) -> None:
        """Call `check` once the running unit is done. There must be one."""
        job.checks.append(check)

    def on_commit(self, do: Callable[[], object]) -> None:
        """Call `do` once the running unit is over. There must be one."""
        job.commits.append(do)

    def note_variable(self, variable: Any) -> None:
        """Restore `variable` before a unit is repeated."""
        job.state.add(variable)

    def check_can_copy(self, what: str) -> None:
        """Raise an error: a repeated unit would not know about a copy of `what`."""
        raise NotImplementedError(f"{what} cannot be copied. Create a new one.")

    def note_optimizer(self, optimizer: Any) -> None:
        """Let `optimizer` prepare its steps again after a loss."""
        job.optimizers.add(optimizer)
        # If the unit that creates it is repeated, it creates the optimizer again.
        on_undo(functools.partial(job.optimizers.discard, optimizer))

    def call(
        self, kind: str, name: str | None = None, options: CommunicationOptions | None = None
    ) -> CollectiveCall:
        """Return the context manager of a collective, which must be called inside a unit."""
        if not job.is_in_unit and not self.is_closed:
            raise NotImplementedError(
                f"{kind} is not supported with elastic=True: it could not be repeated after a loss."
            )
        return super().call(kind, name, options)

    def take_over(self, other: Collectives) -> None:
        """Take over the ranks of `other`, which is not used afterwards."""
        other.abandon()
        own = self._unclosed, self.on_close
        vars(self).update(vars(other))
        (self._unclosed, self.on_close), self.is_closed = own, False
        self.channel.users.add(self)

    def close(self, error: RuntimeError) -> None:
        """Free what no other strategy uses; all later calls raise `error`. **Collective**."""
        try:
            with job.alone():
                super().close(error)
        except CollectiveError as failure:
            if not job.is_loss(failure):
                raise
            leave_lost(self.channel)
            self.abandon()
            self.channel.closed = error
        of_others = (each for each in job.strategies if replica_set_of(each).ranks is not self)
        job.strategies = list(of_others)
