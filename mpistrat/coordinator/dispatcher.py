"""Dispatcher: holds the queue of closures on the chief, and sends them to the workers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.coordinator.closures import (
    Closure,
    FunctionName,
    Outcome,
    describe_call,
    name_of_function,
    pack_arguments,
    run_closure,
    unpack,
)
from mpistrat.coordinator.per_worker import WorkerData
from mpistrat.errors import CancelledError, UnavailableError, WorkerLostError
from mpistrat.parameter_server.store import Lane
from mpistrat.settings import settings_at_the_end
from mpistrat.system.text import text_of

if TYPE_CHECKING:
    from mpistrat.comm.messages import Message
    from mpistrat.parameter_server.server_job import ServerJob


_IN_FLIGHT = 2
"""Closures that are sent to a worker, so that it has the next one when it has finished one."""

_SHORT_NS = 50_000_000
"""Only a worker whose closures take less than this gets a second one in advance. Behind a long
closure it would wait while another worker is idle."""


class Worker:
    """The chief's record of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closures: deque[Closure] = deque()
        """The closures that were sent to it, in the order in which it runs them."""
        self.num_sent = 0
        self.mean_ns = float(_SHORT_NS)
        """Running average of how long its closures take."""
        self.is_reported = False
        """Whether a warning was logged that its closure takes long."""

    def has_room(self, closure: Closure) -> bool:
        """Return whether this closure can be sent to it now."""
        if closure.killed or (self.closures and self.closures[0].killed):
            # Send it by itself. Otherwise another closure could be lost with it, or be taken for
            # the cause.
            room = 1
        else:
            room = _IN_FLIGHT if self.mean_ns < _SHORT_NS else 1
        return len(self.closures) < room


_logger = logging.getLogger("mpistrat")

_MAX_WAITING = 2**18
"""Limit of waiting closures; `schedule` blocks while there are so many."""

_MAX_KILLED = 2
"""Number of workers that a closure may kill before it fails."""

_AT_ONCE = 256
"""Most messages that one call of `pump` takes."""

_LOOK_S = 0.5


class Dispatcher:
    """Sends closures to workers and receives their results, whenever the chief calls `pump`."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job
        self._messages = job.messages
        self._queue: deque[Closure] = deque()
        self._running: dict[int, Closure] = {}
        self._workers = {rank: Worker(rank) for rank in job.workers}
        self._alone = self._workers.pop(0, None) is not None
        """Whether this rank is the only worker."""
        self._number = 0
        self._failed: Closure | None = None
        """The closure whose error is raised next."""
        self._generation = 0
        self._is_pumping = False
        self._looked_at = time.monotonic()
        self._names: dict[Any, FunctionName] = {}
        self.data = WorkerData()
        self.ended: set[int] = set()
        """Ranks that have answered that they are done."""
        self._new_losses: list[int] = []
        """Lost ranks whose earlier results may not have been received yet."""
        self._messages.on_loss = self._new_losses.extend
        job.pump = self.pump

    # Calls of the program

    def schedule(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Closure:
        """Queue a call, and return it."""
        self.raise_failure()
        closure = self._new(fn)
        # Pack before the wait, so that the closure gets the arguments as they are when the program
        # calls `schedule`.
        closure.body, closure.buffers = pack_arguments(self._job, self._name_of(fn), args, kwargs)
        self._wait_for_room()
        # A closure may have failed during the wait.
        self.raise_failure()
        return self._queued(closure)

    def schedule_independent(self, fn: Any, item: Any) -> Closure:
        """Queue a call whose error affects only its own result, and return it.

        If it cannot be queued, that error becomes its outcome.
        """
        closure = self._new(fn, is_independent=True)
        try:
            closure.body, closure.buffers = pack_arguments(
                self._job, self._name_of(fn), (item,), {}
            )
        except (TypeError, ValueError) as error:
            closure.end(error)
            return closure
        self._wait_for_room()
        known = self._job.unavailable
        if known is not None:
            closure.end(CancelledError(f"The closure {closure!r} was not run: {known}"))
            return closure
        return self._queued(closure)

    def _new(self, fn: Any, is_independent: bool = False) -> Closure:
        name = self._name_of(fn)
        self._number += 1
        return Closure(self._number - 1, name.path, self._generation, is_independent)

    def _wait_for_room(self) -> None:
        if len(self._queue) >= _MAX_WAITING:
            self._wait(lambda: len(self._queue) < _MAX_WAITING)

    def _queued(self, closure: Closure) -> Closure:
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
        """Return the result of a closure, or raise its error."""
        outcome = closure.outcome
        assert outcome is not None
        if not isinstance(outcome, Outcome) or closure.has_failed():
            raise closure.error()
        try:
            return unpack(self._job, None, outcome.body, outcome.buffers)
        except Exception as error:  # unpickling an object may raise any exception
            raise TypeError(
                f"The result of the closure {closure!r} cannot be unpickled on the chief: "
                f"{type(error).__name__}: {text_of(error)}. Return arrays, numbers, strings and "
                "nests of them."
            ) from error

    def raise_failure(self) -> None:
        """Raise the error of the first failed closure, once, or the error of a loss, every time."""
        self.check_available()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._generation += 1
            error = failed.error()
            if isinstance(error, UnavailableError):  # its worker has noticed a lost server first
                self._become_unavailable(error)
            raise error

    def check_available(self) -> None:
        """Raise `UnavailableError` if no closure can run any more."""
        known = self._job.unavailable
        if known is not None:
            raise UnavailableError(str(known))

    # The loop

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Send and receive until `is_over` returns true."""
        back_off = self._job.back_off
        back_off.reset()
        while not is_over():
            if self.pump():
                back_off.reset()
                continue
            self._look_around()
            back_off.rest()

    def pump(self) -> bool:
        """Receive results, send closures, and return whether a message had arrived."""
        # User code that runs inside, such as a learning rate that is a function, may read a
        # variable, and each read calls this method again.
        if self._is_pumping:
            return False
        self._is_pumping = True
        try:
            num_taken = self._take_all()
            self._dispatch()
        finally:
            self._is_pumping = False
        return num_taken > 0

    def _take_all(self) -> int:
        """Take the messages that have arrived, and return how many there were."""
        num_taken, is_drained = 0, False
        while num_taken < _AT_ONCE and not is_drained:
            num_lost = len(self._new_losses)
            message = self._messages.poll()
            if message is not None:
                num_taken += 1
                self._take(message)
            else:  # if this call has noticed a loss, that rank may have sent results before
                is_drained = len(self._new_losses) == num_lost
        # Note a loss only after all results of the rank have been received, because a closure whose
        # result has arrived must not run again.
        if is_drained and self._new_losses:
            lost = tuple(self._new_losses)
            self._new_losses.clear()
            self._note_losses(lost)
        return num_taken

    def _take(self, message: Message) -> None:
        if message.lane == Lane.REQUEST:
            self._job.client.answer(message.source, message.number, message.body, message.buffers)
        elif message.lane == Lane.RESULT:
            self._take_outcome(message)
        elif message.lane == Lane.CONTROL:
            self.ended.add(message.source)

    def _take_outcome(self, message: Message) -> None:
        closure = self._running.pop(message.number, None)
        worker = self._workers.get(message.source)
        if closure is None or worker is None or closure not in worker.closures:
            return  # the worker was lost, and its closure runs again
        worker.closures.remove(closure)
        now = time.monotonic_ns()
        worker.mean_ns += ((now - closure.since_ns) - worker.mean_ns) / 4
        worker.is_reported = False
        # A worker runs its closures one after the other, so the next one begins when this one ends.
        if worker.closures:
            worker.closures[0].since_ns = now
        self._end(closure, Outcome(message.kind, message.body, message.buffers))
        self._send_to(worker)

    def _end(self, closure: Closure, outcome: Outcome | Exception) -> None:
        closure.end(outcome)
        if closure.is_independent or not closure.has_failed():
            return
        # If the closure was scheduled before the last error was raised, the program has given up
        # that work. Its error is only logged.
        if self._failed is None and closure.generation == self._generation:
            self._failed = closure
            self.cancel(
                "a different closure has failed. Schedule it again after the error of that closure "
                "has been raised.",
                spares_independent=True,
            )
            return
        error = closure.error()
        text = "\n".join([text_of(error), *getattr(error, "__notes__", ())])
        _logger.warning("closure %r has failed too: %s: %s", closure, type(error).__name__, text)

    def cancel(self, why: str, spares_independent: bool = False) -> None:
        """Cancel all waiting closures; with `spares_independent` except independent ones."""
        queue, self._queue = self._queue, deque()
        for closure in queue:
            if spares_independent and closure.is_independent:
                self._queue.append(closure)
            else:
                closure.end(CancelledError(f"The closure {closure!r} was not run: {why}"))

    def _dispatch(self) -> None:
        if not self._queue:
            return
        for worker in self._workers.values():
            self._send_to(worker)
            if not self._queue:
                return

    def _send_to(self, worker: Worker) -> None:
        """Send closures to a worker until it has enough."""
        while self._queue and worker.has_room(self._queue[0]):
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
        """Run the waiting closures on this rank, because it is the only worker."""
        while self._queue:
            closure = self._queue.popleft()
            outcome = run_closure(self._job, self.data, closure.body, closure.buffers)
            self._end(closure, outcome)

    # Losses, and closures that take long

    def _note_losses(self, ranks: Sequence[int]) -> None:
        """Queue the closures of lost workers again. If a server is lost, cancel all closures."""
        for rank in ranks:
            worker = self._workers.pop(rank, None)
            name = self._job.name_of_rank(rank)
            if worker is None:
                self._become_unavailable(self._job.describe_loss(rank))
                continue
            closures = list(worker.closures)
            # Only the first one was running; the others had not begun.
            if closures:
                closures[0].killed += (name,)
            ran = "; ".join(map(self._described, closures)) or "no closure"
            again = ": again on another worker" if closures else ""
            _logger.warning("The %s is lost. It ran %s%s.", name, ran, again)
            # They return to the front of the queue in their old order.
            for closure in reversed(closures):
                del self._running[closure.number]
                closure.rank = None
                if len(closure.killed) < _MAX_KILLED:
                    self._queue.appendleft(closure)
                else:
                    self._end(closure, self._error_of_killer(closure))
        if not self._workers and not self._alone and self._job.unavailable is None:
            self._become_unavailable(
                UnavailableError(
                    "Every worker is lost, so no closure can run. Start the job again."
                )
            )

    def _error_of_killer(self, closure: Closure) -> WorkerLostError:
        """Return the error of a closure that does not run again, because it kills its workers."""
        return WorkerLostError(
            f"The closure {self._described(closure)}, was running on each of "
            f"{len(closure.killed)} workers when they died: {', '.join(closure.killed)}. It is not "
            "run on another one. Perhaps it needs more memory than a worker has, or crashes in "
            "compiled code: run it by itself to see."
        )

    def _described(self, closure: Closure) -> str:
        """Return the name and number of a closure, and its call, as text."""
        call = describe_call(self._job, closure.body, closure.buffers)
        return f"{closure!r}, called as {call}"

    def _become_unavailable(self, error: UnavailableError) -> None:
        self._job.unavailable = error
        self.cancel(str(error))
        for closure in self._running.values():
            closure.end(CancelledError(f"The closure {closure!r} has no result: {error}"))
        self._running.clear()
        for worker in self._workers.values():
            worker.closures.clear()

    def _look_around(self) -> None:
        """Check every half second for lost ranks and for closures that take long."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._job.check_peers()
        limit_s = settings_at_the_end().wait_notice_s
        for worker in self._workers.values():
            if not worker.closures or worker.is_reported:
                continue
            closure = worker.closures[0]
            ran_s = (time.monotonic_ns() - closure.since_ns) / 1e9
            if ran_s > limit_s:
                worker.is_reported = True
                _logger.warning(
                    "The closure %s, has run for %.0f s on the %s, which is %s.",
                    *(self._described(closure), ran_s, self._job.name_of_rank(worker.rank)),
                    self._job.whereabouts(worker.rank),
                )

    # The end

    def end_workers(self, send: Callable[[int, int], None]) -> None:
        """Tell each worker through `send` to finish, and wait until all have."""
        self.cancel("the strategy was closed.")
        # The number tells a worker how many closures it has to receive before it answers.
        for worker in self._workers.values():
            send(worker.rank, worker.num_sent)
        self._wait(lambda: self._workers.keys() <= self.ended)
        for closure in self._running.values():
            closure.end(
                CancelledError(
                    f"The closure {closure!r} was not run, because the job ended before."
                )
            )
        self._running.clear()
        self._messages.on_loss = None

    @property
    def workers(self) -> list[int]:
        """Ranks of the workers that are not lost."""
        return list(self._workers)
