"""Threads of the replicas of one rank, which run one at a time.

A rank with several replicas runs one function for each of them. A function runs until it has to
wait for the others, or until it returns; then the next one runs. The first function runs in the
calling thread, here called the *main* thread, so a rank with one replica needs no further thread.
Every other function has its own thread, which is kept from run to run. Only the main thread does
the work for which the functions wait, such as a collective, because no other thread may call MPI.
"""

from __future__ import annotations

import contextvars
import copy
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpistrat.errors import ContextError
from mpistrat.native import native_library
from mpistrat.pytorch import in_modes_of_here


class Cancelled(BaseException):
    """Ends the function of a replica because the function of a different one has failed.

    It is not an `Exception`, so that the function does not catch it by accident.
    """


Request = tuple[str, Any, Callable[[list[Any]], Sequence[Any]]]
"""Name of the common work for which a call waits, its contribution, and the function to call.

The function takes the contributions of all calls, and only the function of the first call is used.
Calls that wait for different work disagree."""


class ReplicaCall:
    """Function of one replica in a run, and its progress."""

    # The defaults are on the class, because most attributes are set at most once per run.
    request: Request | None = None
    """Set while the call waits for the others, or for the common work."""
    run_on_main: Callable[[], object] | None = None
    """Function that the main thread has to call before the call resumes."""
    outcome: Any = None
    error: BaseException | None = None
    """Error to raise in the waiting call; after its end, the error that ended it."""
    thread = 0
    """Identifier of the thread that runs it."""
    has_begun = has_ended = False

    def __init__(
        self,
        function: Callable[[], Any],
        context: contextvars.Context,
        pass_turn: Callable[[], Any],
    ) -> None:
        self.function, self.context = function, context
        self.pass_turn = pass_turn
        """Returns the turn to give at its end, or ``None`` for the turn of the main thread."""

    def run(self) -> None:
        """Call the function, and store its result or its error."""
        self.has_begun = True
        self.thread = threading.get_ident()
        try:
            self.outcome, self.error = self.context.run(self.function), None
        except BaseException as error:
            self.error = error
        self.has_ended = True


class _PlainTurns:
    """Turns of threads in plain Python, if ``native/turns.c`` is not compiled."""

    @staticmethod
    def make_turn() -> threading.Lock:
        """Return a turn that no thread has."""
        # This needs a plain lock, not an RLock: one thread releases it to give the turn, and a
        # different one acquires it to take the turn.
        turn = threading.Lock()
        turn.acquire()
        return turn

    @staticmethod
    def hand_over(given: threading.Lock | None, awaited: threading.Lock | None) -> None:
        """Give one turn, and wait for another."""
        if given is not None:
            given.release()
        if awaited is not None:
            awaited.acquire()

    park = hand_over

    @staticmethod
    def has_taken(turn: threading.Lock) -> bool:
        """Return False, because a lock does not tell which thread has acquired it."""
        return False


class ReplicaThread:
    """Thread that runs the functions of one replica, and waits for its turn between them."""

    def __init__(self, number: int, main_turn: Any) -> None:
        # `main_turn` is the turn of the main thread, which runs the first call.
        turns: Any = native_library() or _PlainTurns
        self._own_turn, self._main_turn = turns.make_turn(), main_turn
        self._hand_over, self._park = turns.hand_over, turns.park
        self._has_taken = turns.has_taken
        self._call: ReplicaCall | None = None
        self._thread = threading.Thread(
            # It is a daemon, because a parked thread must not keep the interpreter from exiting.
            target=self._work,
            name=f"mpistrat-replica-{number}",
            daemon=True,
        )
        self._thread.start()

    def assign(self, call: ReplicaCall) -> Any:
        """Let this thread run or resume `call`, and return the turn to give to it."""
        self._call = call
        return self._own_turn

    def give_turn(self, turn: Any, running: Callable[[], ReplicaThread]) -> BaseException | None:
        """Give a thread its `turn`, and wait on the main thread until that has its own turn again.

        Return the error that a signal raised at that moment, or ``None``. `running` returns the
        thread that is running.
        """
        given = turn
        while True:
            try:
                self._hand_over(given, self._main_turn)
                return None
            except BaseException as error:
                # The error was raised after the turn was taken, so no replica runs any more.
                if self._has_taken(self._main_turn):
                    return error
                # Python handles signals such as Ctrl-C on the main thread, which waits here. So
                # interrupt the replica that is running.
                given = None
                running().interrupt(type(error))

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the thread."""
        # CPython takes an unsigned long here; by default ctypes would pass a C int and truncate the
        # identifier. The thread raises the error when it runs its next bytecode.
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))

    def park(self, given: Any) -> None:
        """Give a turn, and wait for this thread's next one. The thread itself calls this."""
        self._park(self._main_turn if given is None else given, self._own_turn)

    def end(self) -> None:
        """End the thread."""
        # Without a call, `_work` returns as soon as it has the turn.
        self._call = None
        self._hand_over(self._own_turn, None)

    def _work(self) -> None:
        given = None
        while True:
            self._park(given, self._own_turn)
            call = self._call
            if call is None:
                return
            call.run()
            self._call, given = None, call.pass_turn() or self._main_turn
            # A parked thread must not keep results and arguments of the last run alive.
            del call


class Turns(Protocol):
    """Object with the index of the running replica."""

    turn: int | None
    """``None`` during the common work."""


class ReplicaThreads:
    """Runs one function per replica of this rank. The functions wait for each other."""

    def __init__(
        self,
        turns: Turns,
        on_disagreement: Callable[[Sequence[ReplicaCall]], BaseException],
    ) -> None:
        # `on_disagreement` returns the error for calls that wait for different things.
        self._turns, self._on_disagreement = turns, on_disagreement
        self._threads: list[ReplicaThread] = []
        self._main_turn = (native_library() or _PlainTurns).make_turn()
        # The threads wait for turns and hold no reference to this object, so they would outlive it.
        weakref.finalize(self, _end, self._threads).atexit = False
        self._calls: list[ReplicaCall] = []
        self._failure: BaseException | None = None
        """First error that has ended a call."""
        self._is_cancelling = False

    @property
    def is_busy(self) -> bool:
        """Whether a run is in progress."""
        return bool(self._calls)

    @property
    def has_failed(self) -> bool:
        """Whether a call has ended with an error, so that the others end too."""
        return self._failure is not None

    def thread_of(self, number: int) -> int:
        """Return the identifier of the thread that runs a call, or 0 if none does."""
        calls = self._calls[number : number + 1]
        return calls[0].thread if calls else 0

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run `functions`, and return their results in order.

        If one raises, the functions that have not begun are not called, the waiting ones get
        `Cancelled`, and then `run` raises the error.
        """
        # Do this first: if there are too many threads, it must raise before a function has begun.
        self._make_threads(len(functions) - 1)
        # Do this before the first function can change state of its thread, such as PyTorch's modes.
        if "torch" in sys.modules:
            functions = in_modes_of_here(functions)
        # Each replica gets its own context: a new thread has none of the caller's values, and
        # replicas must not see values that a different one sets.
        copied, pass_turn = contextvars.copy_context, self._pass_turn
        self._calls = [ReplicaCall(each, copied(), pass_turn) for each in functions]
        if len(functions) == 1:
            return [self._run_alone(self._calls[0])]
        self._is_cancelling, self._failure = False, None
        calls = self._calls
        try:
            self._turns.turn = 0
            calls[0].run()
            self._note_end(calls[0])
            # The first function has returned. The others may still wait for common work, and only
            # this thread can do it.
            while not self.has_failed and self._run_others():
                pass
            self._cancel_others()
            return [each.outcome for each in calls]
        finally:
            self._calls, self._failure, self._is_cancelling = [], None, False

    def _run_alone(self, call: ReplicaCall) -> Any:
        """Run the only call, which does not have to wait for others."""
        self._turns.turn = 0
        call.thread = threading.get_ident()
        try:
            return call.context.run(call.function)
        finally:
            self._calls = []

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the other calls, and return this call's item of the result of `act`.

        The main thread calls `act` once, with the `given` values of all calls.
        """
        # A function that ends with `Cancelled` has called this, for example in a `finally` block.
        # The other replicas do not run any more, so waiting for them would never end.
        if self._is_cancelling:
            raise ContextError(
                f"{what} was called by a replica that ends because another one has failed."
            )
        number = self._turns.turn
        assert number is not None
        if len(self._calls) == 1:
            return self._act_alone(given, act)
        call = self._calls[number]
        call.request = what, given, act
        if number:
            self._threads[number - 1].park(self._pass_turn())
        else:
            self._run_others()
        # The other calls have changed it in the meantime.
        self._turns.turn = number
        if self._failure is not None:
            # From here on, threads give their turn to the main thread, so that at most one function
            # unwinds at a time.
            call.request, self._is_cancelling = None, True
            raise Cancelled
        if call.error is not None:
            self._raise_error(call)
        outcome, call.outcome = call.outcome, None
        return outcome

    def _act_alone(self, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        self._turns.turn = None
        try:
            return act([given])[0]
        finally:
            self._turns.turn = 0

    def run_on_main(self, do: Callable[[], object]) -> None:
        """Call `do` on the main thread now, without waiting for the other replicas."""
        number = self._turns.turn
        if not number:
            do()
            return
        # Set it before giving the turn, because the main thread then looks at it at once.
        self._calls[number].run_on_main = do
        self._threads[number - 1].park(None)
        self._raise_error(self._calls[number])

    def close(self) -> None:
        """End the threads."""
        _end(self._threads)

    def _make_threads(self, count: int) -> None:
        try:
            while len(self._threads) < count:
                self._threads.append(ReplicaThread(len(self._threads) + 1, self._main_turn))
        except RuntimeError as error:
            raise RuntimeError(
                f"This rank has {count + 1} replicas, which need {count} threads, but the system "
                f"allows {len(self._threads)} ({error}). Start more ranks, use fewer replicas, or "
                "raise the limit of processes (ulimit -u)."
            ) from error

    def _run_others(self) -> bool:
        """Run each other call until it waits or ends, and then do the common work.

        Return whether there was common work.
        """
        number = self._next_after(0)
        if number:
            self._give_turn(number)
        if self._failure is None:
            for call in self._calls:
                if call.request is not None:
                    self._act()
                    return True
        return False

    def _next_after(self, number: int) -> int:
        """Return the number of the next call that can resume, or 0 if there is none."""
        for other in range(number + 1, len(self._calls)):
            call = self._calls[other]
            if call.request is None and not call.has_ended:
                return other
        return 0

    def _pass_turn(self) -> Any:
        """Return the turn that a call gives when it waits or ends; ``None`` for the main one."""
        # Go from thread to thread, which takes one switch per replica. Through the main thread it
        # would take two.
        number = self._turns.turn
        assert number is not None
        # The main thread must learn of a failure before any other replica runs.
        if self._is_cancelling or self._calls[number].error is not None:
            return None
        other = self._next_after(number)
        if not other:
            return None
        self._turns.turn = other
        return self._threads[other - 1].assign(self._calls[other])

    def _running(self) -> ReplicaThread:
        return self._threads[(self._turns.turn or 1) - 1]

    def _give_turn(self, number: int) -> None:
        """Run call `number` and the calls after it, until one gives the turn back."""
        while True:
            self._turns.turn = number
            thread, call = self._threads[number - 1], self._calls[number]
            # This returns only when the main thread has its turn again, so the code below never
            # runs at the same time as a replica.
            interruption = thread.give_turn(thread.assign(call), self._running)
            number = self._turns.turn  # a different call may have given the turn back
            call = self._calls[number]
            self._note_end(call)
            # A signal that arrived while no replica ran ends the run like an error of a replica.
            self._failure = self._failure or interruption
            if call.run_on_main is None:
                return
            run_on_main, call.run_on_main = call.run_on_main, None
            try:
                run_on_main()
            except BaseException as error:
                call.error = error

    def _act(self) -> None:
        """Do the common work, and store its result or error in each call."""
        calls = self._calls
        self._turns.turn = None
        try:
            requests = [each.request for each in calls]
            # A call without a request has returned, so the calls that still wait for it would wait
            # forever.
            first = requests[0]
            if first is None or None in requests:
                raise self._on_disagreement(calls)
            kinds, given, _ = zip(*requests, strict=True)
            if kinds.count(first[0]) != len(calls):
                raise self._on_disagreement(calls)
            for call, outcome in zip(calls, first[2](given), strict=True):
                call.outcome, call.request = outcome, None
        except BaseException as error:
            # Each waiting call has to raise, or its thread would stay parked.
            waiting = [each for each in calls if each.request is not None]
            for number, call in enumerate(waiting):
                call.error = error if number == 0 else _again(error)
                call.request = None

    def _note_end(self, call: ReplicaCall) -> None:
        if call.has_ended and self._failure is None:
            self._failure = call.error

    def _raise_error(self, call: ReplicaCall) -> None:
        if call.error is not None:
            error, call.error = call.error, None
            raise error

    def _cancel_others(self) -> None:
        """If a call has failed, end the waiting calls, and raise its error."""
        if self._failure is None:
            return
        self._is_cancelling = True
        for number, call in enumerate(self._calls):
            # Number 0 has run on this thread, and has ended.
            if number and call.has_begun and not call.has_ended:
                self._give_turn(number)
        raise self._failure


def _end(threads: list[ReplicaThread]) -> None:
    for each in threads:
        each.end()
    threads.clear()


def _again(error: BaseException) -> BaseException:
    """Return a copy of an error, which another thread can raise with its own traceback."""
    try:
        return copy.copy(error)
    except Exception:  # the class of the error cannot be copied
        return error
