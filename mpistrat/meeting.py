"""Meetings of the replicas of one rank: their turns, and the threads that carry them.

A *meeting* has as many members as the rank has replicas. Each member is a function that runs until
it meets the others or returns, one at a time, in order. The first runs in the calling thread, so a
meeting of one has no other thread; each other one has its own thread, which is kept from run to
run. Only the calling thread does what the members have met for, such as a collective.
"""

from __future__ import annotations

import contextvars
import copy
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpistrat.errors import ContextError
from mpistrat.native import native_library
from mpistrat.pytorch import in_modes_of_here


class Unwound(BaseException):
    """Ends a member that has met others, one of which has failed. Not an `Exception`: see `run`."""


Request = tuple[str, Any, Callable[[list[Any]], Sequence[Any]]]
"""What a member has met the others for, what it has given, and what is called once with what all
have given; that of the first member is taken. Members with another "what" do not meet."""


class Member:
    """One function of a run, and how far it has come."""

    # Defaults on the class: most of it is set once in a run, if ever.
    request: Request | None = None
    """While it waits for the others, or for what they have met for."""
    errand: Callable[[], object] | None = None
    """What the calling thread is to do for it at once."""
    outcome: Any = None
    error: BaseException | None = None
    """What to raise where it waits; at the end, what has ended it."""
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
        """Returns the turn to give when this one has ended, ``None`` for the calling thread's."""

    def go(self) -> None:
        """Run from the begin to the end."""
        self.has_begun = True
        self.thread = threading.get_ident()
        try:
            self.outcome, self.error = self.context.run(self.function), None
        except BaseException as error:
            self.error = error
        self.has_ended = True


class _PlainTurns:
    """Turns of threads where nothing is compiled: see ``native/turns.c``."""

    @staticmethod
    def make_turn() -> threading.Lock:
        """Return a turn that nobody has been given."""
        turn = threading.Lock()
        turn.acquire()
        return turn

    @staticmethod
    def hand_over(given: threading.Lock | None, awaited: threading.Lock | None) -> None:
        """Give one turn, and wait for the other."""
        if given is not None:
            given.release()
        if awaited is not None:
            awaited.acquire()

    park = hand_over

    @staticmethod
    def has_taken(turn: threading.Lock) -> bool:
        """Return False: a lock does not tell."""
        return False


class _Carrier:
    """A kept thread that has the turn or waits for it."""

    def __init__(self, number: int, home: Any) -> None:
        # `home` is the turn of the thread that runs the first member.
        turns: Any = native_library() or _PlainTurns
        self._go, self._home = turns.make_turn(), home
        self._hand_over, self._park = turns.hand_over, turns.park
        self._has_taken = turns.has_taken
        self._member: Member | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"mpistrat-replica-{number}", daemon=True
        )
        self._thread.start()

    def take_on(self, member: Member) -> Any:
        """Return the turn to give this thread, so that it runs `member`, begun already or not."""
        self._member = member
        return self._go

    def give_turn(self, turn: Any, running: Callable[[], _Carrier]) -> BaseException | None:
        """Give a thread its `turn`, and wait until one gives the turn back to the calling thread.

        Return what a signal has raised here just then. `running` returns whose turn it is.
        """
        given = turn
        while True:
            try:
                self._hand_over(given, self._home)
                return None
            except BaseException as error:
                if self._has_taken(self._home):
                    return error
                # Ctrl-C comes to the main thread, and means the one whose turn it is.
                given = None
                running().interrupt(type(error))

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the thread."""
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))

    def park(self, given: Any) -> None:
        """Give a turn, and wait for the next one of this thread. Called by the thread itself."""
        self._park(self._home if given is None else given, self._go)

    def end(self) -> None:
        """End the thread."""
        self._member = None
        self._hand_over(self._go, None)

    def _work(self) -> None:
        given = None
        while True:
            self._park(given, self._go)
            member = self._member
            if member is None:
                return
            member.go()
            self._member, given = None, member.pass_turn() or self._home
            del member


class Turns(Protocol):
    """Who knows whose turn it is."""

    turn: int | None
    """The number of the member that runs, ``None`` while what they have met for is done."""


class Meeting:
    """Runs functions, one for each replica of this rank, which meet each other."""

    def __init__(
        self,
        turns: Turns,
        on_disagreement: Callable[[Sequence[Member]], BaseException],
    ) -> None:
        # `on_disagreement` returns the error for members that do not meet.
        self._turns, self._on_disagreement = turns, on_disagreement
        self._carriers: list[_Carrier] = []
        self._home = (native_library() or _PlainTurns).make_turn()
        # The threads wait for turns, and know nothing of this: they would outlive it.
        weakref.finalize(self, _end, self._carriers).atexit = False
        self._members: list[Member] = []
        self._failure: BaseException | None = None
        """The first error that has ended a member."""
        self._is_unwinding = False

    @property
    def is_busy(self) -> bool:
        """Whether it runs."""
        return bool(self._members)

    @property
    def has_failed(self) -> bool:
        """Whether a member has ended with an error, for which the others end too."""
        return self._failure is not None

    def thread_of(self, number: int) -> int:
        """Return the identifier of the thread that runs a member, 0 where none does."""
        members = self._members[number : number + 1]
        return members[0].thread if members else 0

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what `functions` return, in order.

        Where one raises, those that have not begun never begin, and the others get an `Unwound`
        where they wait; then the error is raised.
        """
        self._make_carriers(len(functions) - 1)
        # What belongs to a thread is copied before the first one can change its own.
        functions = in_modes_of_here(functions)
        copied, pass_turn = contextvars.copy_context, self._pass_turn
        self._members = [Member(each, copied(), pass_turn) for each in functions]
        if len(functions) == 1:
            return [self._run_alone(self._members[0])]
        self._is_unwinding, self._failure = False, None
        members = self._members
        try:
            self._turns.turn = 0
            members[0].go()
            self._note_end(members[0])
            while not self.has_failed and self._bring_others():
                pass
            self._unwind()
            return [each.outcome for each in members]
        finally:
            self._members, self._failure, self._is_unwinding = [], None, False

    def _run_alone(self, member: Member) -> Any:
        """Run the only member, which meets nobody: the short way."""
        self._turns.turn = 0
        member.thread = threading.get_ident()
        try:
            return member.context.run(member.function)
        finally:
            self._members = []

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the other members, and return this one's item of what `act` returns."""
        if self._is_unwinding:
            raise ContextError(
                f"{what} was called by a replica that ends because another one has failed."
            )
        number = self._turns.turn
        assert number is not None
        if len(self._members) == 1:
            return self._act_alone(given, act)
        member = self._members[number]
        member.request = what, given, act
        if number:
            self._carriers[number - 1].park(self._pass_turn())
        else:
            self._bring_others()
        self._turns.turn = number
        if self._failure is not None:
            member.request, self._is_unwinding = None, True
            raise Unwound
        if member.error is not None:
            self._raise_error(member)
        outcome, member.outcome = member.outcome, None
        return outcome

    def _act_alone(self, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        self._turns.turn = None
        try:
            return act([given])[0]
        finally:
            self._turns.turn = 0

    def errand(self, do: Callable[[], object]) -> None:
        """Have the calling thread call `do`, at once."""
        number = self._turns.turn
        if not number:
            do()
            return
        self._members[number].errand = do
        self._carriers[number - 1].park(None)
        self._raise_error(self._members[number])

    def close(self) -> None:
        """End the threads."""
        _end(self._carriers)

    def _make_carriers(self, count: int) -> None:
        try:
            while len(self._carriers) < count:
                self._carriers.append(_Carrier(len(self._carriers) + 1, self._home))
        except RuntimeError as error:
            raise RuntimeError(
                f"This rank has {count + 1} replicas, which need {count} threads, but the system "
                f"gives {len(self._carriers)} ({error}). Start more ranks, take fewer replicas, or "
                "raise the limit of processes (ulimit -u)."
            ) from error

    def _bring_others(self) -> bool:
        """Let each other member come to the meeting or to its end; then do what they met for.

        Return whether they have met.
        """
        number = self._next_after(0)
        if number:
            self._give_turn(number)
        if self._failure is None:
            for member in self._members:
                if member.request is not None:
                    self._act()
                    return True
        return False

    def _next_after(self, number: int) -> int:
        """Return the number of the next member that can go on, 0 where there is none."""
        for other in range(number + 1, len(self._members)):
            member = self._members[other]
            if member.request is None and not member.has_ended:
                return other
        return 0

    def _pass_turn(self) -> Any:
        """Return the turn to give by a member that meets or ends, ``None`` for the first one's."""
        number = self._turns.turn
        assert number is not None
        if self._is_unwinding or self._members[number].error is not None:
            return None
        other = self._next_after(number)
        if not other:
            return None
        self._turns.turn = other
        return self._carriers[other - 1].take_on(self._members[other])

    def _running(self) -> _Carrier:
        return self._carriers[(self._turns.turn or 1) - 1]

    def _give_turn(self, number: int) -> None:
        """Let member `number` run, and those it passes the turn to, until one gives it back."""
        while True:
            self._turns.turn = number
            carrier, member = self._carriers[number - 1], self._members[number]
            interruption = carrier.give_turn(carrier.take_on(member), self._running)
            number = self._turns.turn
            member = self._members[number]
            self._note_end(member)
            self._failure = self._failure or interruption
            if member.errand is None:
                return
            errand, member.errand = member.errand, None
            try:
                errand()
            except BaseException as error:
                member.error = error

    def _act(self) -> None:
        """Do what the members have met for, and give each its outcome, or the error."""
        members = self._members
        self._turns.turn = None
        try:
            requests = [each.request for each in members]
            first = requests[0]
            if first is None or None in requests:
                raise self._on_disagreement(members)
            kinds, given, _ = zip(*requests, strict=True)
            if kinds.count(first[0]) != len(members):
                raise self._on_disagreement(members)
            for member, outcome in zip(members, first[2](given), strict=True):
                member.outcome, member.request = outcome, None
        except BaseException as error:
            waiting = [each for each in members if each.request is not None]
            for number, member in enumerate(waiting):
                member.error = error if number == 0 else _again(error)
                member.request = None

    def _note_end(self, member: Member) -> None:
        if member.has_ended and self._failure is None:
            self._failure = member.error

    def _raise_error(self, member: Member) -> None:
        if member.error is not None:
            error, member.error = member.error, None
            raise error

    def _unwind(self) -> None:
        """End the members that wait, if one has failed, and raise its error."""
        if self._failure is None:
            return
        self._is_unwinding = True
        for number, member in enumerate(self._members):
            if number and member.has_begun and not member.has_ended:
                self._give_turn(number)
        raise self._failure


def _end(carriers: list[_Carrier]) -> None:
    for each in carriers:
        each.end()
    carriers.clear()


def _again(error: BaseException) -> BaseException:
    """Return an error that another thread can raise too, with its own traceback."""
    try:
        return copy.copy(error)
    except Exception:  # of a class that cannot be copied
        return error
