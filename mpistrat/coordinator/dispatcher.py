"""Dispatcher: the queue of closures on the chief, and the workers that they go to."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.coordinator.closures import (
    FAILED,
    Closure,
    FunctionName,
    Outcome,
    error_of,
    name_of_function,
    pack_arguments,
    run_closure,
    unpack,
)
from mpistrat.coordinator.per_worker import WorkerData
from mpistrat.errors import CancelledError, UnavailableError
from mpistrat.settings import settings_at_the_end
from mpistrat.system.text import text_of
from mpistrat.variables.parameter_client import Lane

if TYPE_CHECKING:
    from mpistrat.comm.messages import Message
    from mpistrat.strategies.server_extended import ServerExtended

__all__ = ["Dispatcher"]

_logger = logging.getLogger("mpistrat")

_MAX_WAITING = 2**18
"""Closures that wait; `schedule` blocks while there are so many."""

_IN_FLIGHT = 2
"""Closures at a worker, so that it has the next one when it has done one."""

_SHORT_NS = 50_000_000
"""How long closures may take for a second one to be sent along. It would wait behind a long one
while another worker has nothing to do."""

_AT_ONCE = 256
"""Messages that are looked at in one turn."""

_LOOK_S = 0.5


class _Worker:
    """What the chief knows of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closures: deque[Closure] = deque()
        """Those that it has, in the order in which it runs them."""
        self.num_sent = 0
        self.mean_ns = float(_SHORT_NS)
        """How long its closures take, at least about."""
        self.is_reported = False
        """Whether the closure that it runs was reported for taking long."""

    def has_room(self) -> bool:
        """Return whether it is to get a closure."""
        room = _IN_FLIGHT if self.mean_ns < _SHORT_NS else 1
        return len(self.closures) < room


class Dispatcher:
    """Sends closures to workers and takes what comes back, whenever the chief lets it."""

    def __init__(self, extended: ServerExtended) -> None:
        self._extended = extended
        self._messages = extended._messages
        self._queue: deque[Closure] = deque()
        self._running: dict[int, Closure] = {}
        self._workers = {rank: _Worker(rank) for rank in extended._workers}
        self._alone = self._workers.pop(0, None) is not None
        """Whether this rank is the only worker."""
        self._number = 0
        self._failed: Closure | None = None
        """Whose error is to be raised next."""
        self._generation = 0
        self._is_pumping = False
        self._looked_at = time.monotonic()
        self._names: dict[Any, FunctionName] = {}
        self.data = WorkerData(extended)
        self.ended: set[int] = set()
        """The ranks that have said that they are done."""
        self._messages.on_loss = self._note_losses
        extended._pump = self.pump

    # What the program asks for

    def schedule(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Closure:
        """Queue a call, and return it."""
        self.raise_failure()
        name = self._name_of(fn)
        body, buffers = pack_arguments(self._extended, name, args, kwargs)
        closure = Closure(self._number, name.path, body, buffers, self._generation)
        self._number += 1
        if len(self._queue) >= _MAX_WAITING:
            self._wait(lambda: len(self._queue) < _MAX_WAITING)
            self.raise_failure()
        self._queue.append(closure)
        if self._alone:
            self._run_here()
        else:
            self.pump()
        return closure

    def _name_of(self, fn: Any) -> FunctionName:
        try:
            known = self._names.get(fn)
        except TypeError:  # not hashable
            known = None
        if known is None:
            known = name_of_function("schedule", fn)
            self._names[fn] = known
        return known

    def join(self) -> None:
        """Wait until every closure has an outcome, and raise the first error."""
        self._wait(self.is_done)
        self.raise_failure()

    def is_done(self) -> bool:
        """Return whether every closure has an outcome."""
        return not self._queue and not self._running

    def wait_for(self, closure: Closure) -> None:
        """Wait until a closure has an outcome."""
        self._wait(lambda: closure.outcome is not None)

    def result_of(self, closure: Closure) -> Any:
        """Return what a closure has returned, or raise its error."""
        outcome = closure.outcome
        assert outcome is not None
        if not isinstance(outcome, Outcome):
            raise type(outcome)(*outcome.args)
        if outcome.kind == FAILED:
            raise error_of(outcome)
        try:
            return unpack(self._extended, None, outcome.body, outcome.buffers)
        except Exception as error:  # objects raise what they like
            raise TypeError(
                f"The result of the closure {closure!r} cannot be unpickled on the chief: "
                f"{type(error).__name__}: {text_of(error)}. Return arrays, numbers, texts and "
                "nests of them."
            ) from error

    def raise_failure(self) -> None:
        """Raise the error of the first closure that has failed, once; or that of a loss, always."""
        self.check_available()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._generation += 1
            assert isinstance(failed.outcome, Outcome)
            raise error_of(failed.outcome)

    def check_available(self) -> None:
        """Raise where nothing can run any more."""
        known = self._extended._unavailable
        if known is not None:
            raise UnavailableError(str(known))

    # The loop

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Do what there is to do until something is over."""
        back_off = self._extended._back_off
        back_off.reset()
        while not is_over():
            if self.pump():
                back_off.reset()
                continue
            self._look_around()
            back_off.rest()

    def pump(self) -> bool:
        """Take what has come, send what can go, and return whether there was something."""
        if self._is_pumping:
            return False
        self._is_pumping = True
        try:
            num_taken = 0
            while num_taken < _AT_ONCE:
                message = self._messages.poll()
                if message is None:
                    break
                num_taken += 1
                self._take(message)
            self._dispatch()
        finally:
            self._is_pumping = False
        return num_taken > 0

    def _take(self, message: Message) -> None:
        if message.lane == Lane.REQUEST:
            self._extended._client.answer(
                message.source, message.number, message.body, message.buffers
            )
        elif message.lane == Lane.RESULT:
            self._take_outcome(message)
        elif message.lane == Lane.CONTROL:
            self.ended.add(message.source)

    def _take_outcome(self, message: Message) -> None:
        closure = self._running.pop(message.number, None)
        worker = self._workers.get(message.source)
        if closure is None or worker is None or closure not in worker.closures:
            return  # of a worker that is lost, whose closure runs again
        worker.closures.remove(closure)
        now = time.monotonic_ns()
        worker.mean_ns += ((now - closure.since_ns) - worker.mean_ns) / 4
        worker.is_reported = False
        if worker.closures:
            worker.closures[0].since_ns = now
        self._end(closure, Outcome(message.kind, message.body, message.buffers))
        self._send_to(worker)

    def _end(self, closure: Closure, outcome: Outcome) -> None:
        closure.end(outcome)
        if outcome.kind != FAILED:
            return
        if self._failed is None and closure.generation == self._generation:
            self._failed = closure
            self.cancel("another closure has failed before.")
            return
        error = error_of(outcome)
        _logger.warning(
            "closure %r has failed too: %s: %s", closure, type(error).__name__, text_of(error)
        )

    def cancel(self, why: str) -> None:
        """Cancel all closures that wait."""
        queue, self._queue = self._queue, deque()
        for closure in queue:
            closure.end(CancelledError(f"The closure {closure!r} was not run: {why}"))

    def _dispatch(self) -> None:
        if not self._queue:
            return
        for worker in self._workers.values():
            self._send_to(worker)
            if not self._queue:
                return

    def _send_to(self, worker: _Worker) -> None:
        """Send closures to a worker while it has room."""
        while self._queue and worker.has_room():
            closure = self._queue.popleft()
            if not worker.closures:
                closure.since_ns = time.monotonic_ns()
            closure.rank = worker.rank
            worker.closures.append(closure)
            worker.num_sent += 1
            self._running[closure.number] = closure
            assert closure.body is not None
            self._messages.send(
                worker.rank, Lane.CLOSURE, 0, closure.number, closure.body, closure.buffers
            )

    def _run_here(self) -> None:
        """Run what waits on this rank, which is alone."""
        while self._queue:
            closure = self._queue.popleft()
            outcome = run_closure(self._extended, self.data, closure.body, closure.buffers)
            self._end(closure, outcome)

    # Losses, and closures that take long

    def _note_losses(self, ranks: Sequence[int]) -> None:
        """Queue the closures of lost workers again, or learn of the loss of a server."""
        for rank in ranks:
            worker = self._workers.pop(rank, None)
            name = self._extended._name_of_rank(rank)
            if worker is None:
                self._become_unavailable(self._extended._describe_loss(rank))
                continue
            closures = list(worker.closures)
            for closure in reversed(closures):
                del self._running[closure.number]
                closure.rank = None
                self._queue.appendleft(closure)
            ran = ", ".join(map(repr, closures)) or "no closure"
            again = ": again on another worker" if closures else ""
            _logger.warning("The %s is lost. It ran %s%s.", name, ran, again)
        if not self._workers and not self._alone and self._extended._unavailable is None:
            self._become_unavailable(
                UnavailableError(
                    "Every worker is lost, so no closure can run. Start the job again."
                )
            )

    def _become_unavailable(self, error: UnavailableError) -> None:
        self._extended._unavailable = error
        self.cancel(str(error))
        for closure in self._running.values():
            closure.end(CancelledError(f"The closure {closure!r} has no result: {error}"))
        self._running.clear()
        for worker in self._workers.values():
            worker.closures.clear()

    def _look_around(self) -> None:
        """Look, now and then, for ranks that are lost and closures that take long."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._extended._check_peers()
        limit_s = settings_at_the_end().wait_notice_s
        for worker in self._workers.values():
            if not worker.closures or worker.is_reported:
                continue
            closure = worker.closures[0]
            ran_s = (time.monotonic_ns() - closure.since_ns) / 1e9
            if ran_s > limit_s:
                worker.is_reported = True
                _logger.warning(
                    "The closure %r has run for %.0f s on the %s, which is %s.",
                    *(closure, ran_s, self._extended._name_of_rank(worker.rank)),
                    self._extended._whereabouts(worker.rank),
                )

    # The end

    def end_workers(self, send: Callable[[int, int], None]) -> None:
        """Have `send` tell each worker the number of its closures, and wait for them all."""
        self.cancel("the strategy was closed.")
        for worker in self._workers.values():
            send(worker.rank, worker.num_sent)
        self._wait(lambda: self._workers.keys() <= self.ended)
        for closure in self._running.values():
            closure.end(CancelledError(f"The closure {closure!r} was not run: the end came first."))
        self._running.clear()
        self._messages.on_loss = None

    @property
    def workers(self) -> list[int]:
        """The ranks of the workers that are left."""
        return list(self._workers)
