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
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.errors import ContextError

__all__ = ["Meeting", "Member"]


class Unwound(BaseException):
    """Ends a member that has met others, one of which has failed. Not an `Exception`: see `run`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a member has met the others for."""

    what: str
    """Members with another one do not meet."""
    given: Any
    act: Callable[[list[Any]], Sequence[Any]]
    """Called once with what all have given; that of the first member is taken."""


class Member:
    """One function of a run, and how far it has come."""

    def __init__(self, function: Callable[[], Any], context: contextvars.Context) -> None:
        self._function, self._context = function, context
        self.request: Request | None = None
        """While it waits for the others, or for what they have met for."""
        self.errand: Callable[[], object] | None = None
        """What the calling thread is to do for it at once."""
        self.outcome: Any = None
        self.error: BaseException | None = None
        """What to raise where it waits; at the end, what has ended it."""
        self.thread = 0
        """Identifier of the thread that runs it."""
        self.has_begun = self.has_ended = False

    def go(self) -> None:
        """Run from the begin to the end."""
        self.has_begun = True
        self.thread = threading.get_ident()
        try:
            self.outcome, self.error = self._context.run(self._function), None
        except BaseException as error:
            self.error = error
        self.has_ended = True


class _Carrier:
    """A kept thread that has the turn or waits for it."""

    def __init__(self, number: int) -> None:
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._member: Member | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"mpistrat-replica-{number}", daemon=True
        )
        self._thread.start()

    def give_turn(self, member: Member) -> None:
        """Let the thread run `member`, begun already or not, until it gives the turn back."""
        self._member = member
        self._go.release()
        while True:
            try:
                self._back.acquire()
                return
            except BaseException as error:
                # Ctrl-C comes to the main thread, and means the one whose turn it is.
                self._interrupt(type(error))

    def _interrupt(self, error: type[BaseException]) -> None:
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))

    def park(self) -> None:
        """Give the turn back, and wait for the next one. Called by the thread itself."""
        self._back.release()
        self._go.acquire()

    def end(self) -> None:
        """End the thread."""
        self._member = None
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            member = self._member
            if member is None:
                return
            member.go()
            del member
            self._member = None
            self._back.release()


class Meeting:
    """Runs functions, one for each replica of this rank, which meet each other."""

    def __init__(
        self,
        size: int,
        on_turn: Callable[[int | None], object],
        on_disagreement: Callable[[Sequence[Member]], BaseException],
    ) -> None:
        # `on_turn` is called with the number of the member that runs next, and with ``None`` before
        # what they have met for. `on_disagreement` returns the error for members that do not meet.
        self._size = size
        self._on_turn, self._on_disagreement = on_turn, on_disagreement
        self._carriers: list[_Carrier] = []
        self._members: list[Member] = []
        self._current = 0
        self._failure: BaseException | None = None
        """The first error that has ended a member."""
        self._is_unwinding = False

    @property
    def is_busy(self) -> bool:
        """Whether it runs."""
        return bool(self._members)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what `functions` return, in order.

        Where one raises, those that have not begun never begin, and the others get an `Unwound`
        where they wait; then the error is raised.
        """
        # Copied before the first one can change its own.
        self._members = [Member(each, contextvars.copy_context()) for each in functions]
        self._is_unwinding, self._failure = False, None
        while len(self._carriers) < len(functions) - 1:
            self._carriers.append(_Carrier(len(self._carriers) + 1))
        members = self._members
        try:
            self._turn(0)
            self._go(members[0], members[0].go)
            while self._failure is None and not all(each.has_ended for each in members):
                self._bring_others()
            self._unwind()
            if self._failure is not None:
                raise self._failure
            return [each.outcome for each in members]
        finally:
            self._members, self._failure = [], None

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the other members, and return this one's item of what `act` returns."""
        if self._is_unwinding:
            raise ContextError(
                f"{what} was called by a replica that ends because another one has failed."
            )
        number = self._current
        member = self._members[number]
        member.request = Request(what, given, act)
        if number:
            self._carriers[number - 1].park()
        else:
            self._bring_others()
        self._turn(number)
        if self._failure is not None:
            member.request, self._is_unwinding = None, True
            raise Unwound
        self._raise_error(member)
        outcome, member.outcome = member.outcome, None
        return outcome

    def errand(self, do: Callable[[], object]) -> None:
        """Have the calling thread call `do`, at once."""
        number = self._current
        if number == 0:
            do()
            return
        self._members[number].errand = do
        self._carriers[number - 1].park()
        self._raise_error(self._members[number])

    def close(self) -> None:
        """End the threads."""
        for each in self._carriers:
            each.end()
        self._carriers.clear()

    def _bring_others(self) -> None:
        """Let each other member come to the meeting or to its end; then do what they met for."""
        for number, member in enumerate(self._members):
            if number and not member.has_ended and member.request is None:
                self._give_turn(number)
                if self._failure is not None:
                    return
        if any(each.request is not None for each in self._members):
            self._act()

    def _give_turn(self, number: int) -> None:
        member, carrier = self._members[number], self._carriers[number - 1]
        while True:
            self._turn(number)
            self._go(member, functools.partial(carrier.give_turn, member))
            if member.errand is None:
                return
            errand, member.errand = member.errand, None
            try:
                errand()
            except BaseException as error:
                member.error = error

    def _act(self) -> None:
        """Do what the members have met for, and give each its outcome, or the error."""
        requests = [each.request for each in self._members]
        waiting = [each for each in self._members if each.request is not None]
        self._turn(None)
        try:
            if len({None if each is None else each.what for each in requests}) > 1:
                raise self._on_disagreement(self._members)
            outcomes = requests[0].act([each.given for each in requests if each is not None])  # type: ignore[union-attr]
            for member, outcome in zip(waiting, outcomes, strict=True):
                member.outcome = outcome
        except BaseException as error:
            for number, member in enumerate(waiting):
                member.error = error if number == 0 else _again(error)
        for member in waiting:
            member.request = None

    def _turn(self, number: int | None) -> None:
        if number is not None:
            self._current = number
        self._on_turn(number)

    def _go(self, member: Member, go: Callable[[], None]) -> None:
        go()
        if member.has_ended and self._failure is None:
            self._failure = member.error

    def _raise_error(self, member: Member) -> None:
        if member.error is not None:
            error, member.error = member.error, None
            raise error

    def _unwind(self) -> None:
        """End the members that wait."""
        self._is_unwinding = True
        for number, member in enumerate(self._members):
            if number and member.has_begun and not member.has_ended:
                self._give_turn(number)


def _again(error: BaseException) -> BaseException:
    """Return an error that another thread can raise too, with its own traceback."""
    try:
        return copy.copy(error)
    except Exception:  # of a class that cannot be copied
        return error
