"""Replicas of one rank under ``num_replicas=``: their numbers, turns and collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat import context
from mpistrat.agreement.replica_channel import ReplicaChannel, describe_apart
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.replica_reducer import Meetings
from mpistrat.layout import Layout, SharedLayout
from mpistrat.meeting import Meeting, Member
from mpistrat.system.callsite import site_of_thread
from mpistrat.values import LocalReplicas


class ReplicaGroup:
    """The replicas of this rank, as the layout of the `ranks` says."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks
        self.turn: int | None = None
        """The position of the replica that runs, ``None`` outside of all."""
        self._meetings: list[Meeting] = []
        self._running: list[Meeting] = []
        """Those that run, each within an act of the one before."""
        self.reform()

    def reform(self) -> None:
        """Have the replicas that the layout of the ranks says now."""
        ranks = self.ranks
        of_rank = ranks.layout
        assert isinstance(of_rank, SharedLayout)
        self.num_replicas = of_rank.num_replicas
        self.ids = of_rank.local_replicas
        self._layouts = [dataclasses.replace(of_rank, running=each) for each in self.ids]
        self._layouts.append(of_rank)
        self._ways = Meetings(self.meet, self.errand)
        # A replica that has a rank for itself communicates as the rank does.
        self._members: list[Collectives] = (
            [ranks]
            if self.num_replicas == ranks.size
            else [self._member(each) for each in self.ids]
        )

    def _member(self, replica_id: int) -> Collectives:
        ranks = self.ranks
        channel = ReplicaChannel(ranks.channel, self._ways, replica_id, self.num_replicas)
        made = ranks.again(channel, Layout(self.num_replicas, replica_id))
        made.number = ranks.number
        return made

    @property
    def collectives(self) -> Collectives:
        """Those of the replica that runs, outside of all those of the ranks."""
        return self.ranks if self.turn is None else self._members[self.turn]

    def member(self, replica_id: int) -> Collectives:
        """Return those of a replica of this rank."""
        return self._members[replica_id - self.ids[0]]

    @property
    def layout(self) -> Layout:
        """That of the rank, as the replica sees it that runs."""
        return self._layouts[-1 if self.turn is None else self.turn]

    @property
    def is_unwinding(self) -> bool:
        """Whether replicas end here because another one has failed."""
        return self._running[-1].has_failed

    def turn_now(self) -> int | None:
        """Return the position of the replica that runs, ``None`` outside of all."""
        return self.turn

    def per_replica(self, components: Sequence[Any]) -> LocalReplicas[Any]:
        """Return the distributed value of the replicas' components."""
        return LocalReplicas(components, self.turn_now)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what `functions`, one for each replica of this rank, return."""
        meeting = next((each for each in self._meetings if not each.is_busy), None)
        if meeting is None:
            meeting = Meeting(self, self._not_met)
            self._meetings.append(meeting)
        before = self.turn
        self._running.append(meeting)
        self.ranks.channel.running = self._whose_turn
        try:
            return meeting.run(functions)
        finally:
            self._running.pop()
            self.turn = before

    def _whose_turn(self) -> tuple[int, str] | None:
        """Return the thread of the replica that runs, and its name, from any thread."""
        turn, running = self.turn, self._running[-1:]
        thread = running[0].thread_of(turn) if turn is not None and running else 0
        return (thread, f"replica {self.ids[turn or 0]}") if thread else None

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Return what `function` returns as each replica of this rank, in the current context."""
        frame, device = context.current(), self.ranks.capabilities.device
        if self.turn is not None:
            return [function()]  # that of the replica that runs

        def as_replica() -> Any:
            with device.current():
                if frame is None:
                    return function()
                with context.entered(frame):
                    return function()

        return self.run([as_replica] * len(self.ids))

    def once(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, once for this rank, when its replicas have met."""
        if self.turn is None:
            return function()
        return self.meet("a common step", function, self._call_first)

    def _call_first(self, functions: list[Callable[[], Any]]) -> list[Any]:
        return [functions[0]()] * len(functions)

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Have the replicas of this rank meet: see `Meeting.meet`."""
        return self._running[-1].meet(what, given, act)

    def errand(self, do: Callable[[], object]) -> None:
        """Have the calling thread call `do`: see `Meeting.errand`."""
        self._running[-1].errand(do)

    def close(self) -> None:
        """End the threads."""
        for each in self._meetings:
            each.close()
        self._meetings.clear()

    def apart(self, calls: Sequence[str]) -> BaseException:
        """Return the error for replicas that have met with different `calls`. **Collective**."""
        sites = map(site_of_thread, map(self._running[-1].thread_of, range(len(calls))))
        waiting = list(zip(self.ids, calls, calls, sites, strict=True))
        return describe_apart(self.ranks.channel, [], waiting)

    def _not_met(self, members: Sequence[Member]) -> BaseException:
        """Return the error for replicas of this rank that do not meet. **Collective**."""
        returned, waiting = [], []
        for replica, member in zip(self.ids, members, strict=True):
            if member.request is None:
                returned.append(replica)
            else:
                what, given, _ = member.request
                waiting.append((replica, what, given, site_of_thread(member.thread)))
        return describe_apart(self.ranks.channel, returned, waiting)
