"""Channel of a replica that shares its rank: the replicas agree through the rank's channel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.disagreement import calls_with_structures, disagreement_error
from mpistrat.agreement.ledger import Outcome, Status, digest_of
from mpistrat.collectives.reduction import Row
from mpistrat.errors import CollectiveError
from mpistrat.replicas.replica_reducer import ReplicaLinks, reduce_rows
from mpistrat.replicas.replica_threads import Cancelled
from mpistrat.replicas.replica_transport import ReplicaTransport
from mpistrat.system.callsite import users_place
from mpistrat.system.text import format_call
from mpistrat.tracing.flight_recorder import State

_CALL, _ALL_CALL = Status.CALL, Outcome.ALL_CALL
_DIFFERENT = ("replicas that differ",)


class _Vote(NamedTuple):
    """Contribution of one replica to a round."""

    status: Status
    digest: int
    signature: Any
    timeout_s: float | None
    extra: int
    row: Row | None
    """Arrays to reduce as soon as all agree."""


class ReplicaChannel(Channel):
    """Channel of one replica, through which all replicas agree; `ranks` is the rank's channel.

    The replicas of a rank first wait for each other. If their votes are equal, the rank casts this
    vote in a round of the ranks.
    """

    shares_memory = True

    def __init__(
        self, ranks: Channel, links: ReplicaLinks, replica_id: int, num_replicas: int
    ) -> None:
        self._ranks, self._meet = ranks, links.meet
        self.links = links
        transport = ReplicaTransport(ranks.transport, links, replica_id, num_replicas)
        super().__init__(transport, ranks.timeout_s)
        self.checks = ranks.checks
        # Compiled code must not start the round of the ranks for a single replica. Without `meet`
        # it calls `vote`, which first waits for the other replicas of this rank.
        self.meet = None
        self.departures = ranks.departures
        self.ledger = ranks.ledger  # the collectives count as collectives of the rank
        self.row_reducer = transport.node
        # The flight record of the rank has the collectives of its replicas: see `_vote_as_rank`.
        self.flight.resize(1)
        self.num_strategies = ranks.num_strategies

    @property
    def closed(self) -> RuntimeError | None:
        """Error that has closed the channel of the ranks; ``None`` while it is open."""
        return self._ranks.closed

    @closed.setter
    def closed(self, error: RuntimeError | None) -> None:
        if error is not None:  # the constructor sets None
            self._ranks.closed = error

    def vote(
        self, status: Status, signature: object, timeout_s: float | None, extra: int = 0
    ) -> Outcome:
        """Wait for the other replicas of this rank, and take part in a round of the ranks."""
        # Use the row only for this vote, or the next call would reduce it.
        row, self.row = self.row, None
        vote = _Vote(status, digest_of(signature) ^ extra, signature, timeout_s, extra, row)
        try:
            outcome: Outcome = self._meet("agreement", vote, self._vote_as_rank)
        except CollectiveError:
            if status is Status.CALL:
                raise
            outcome = Outcome.MIXED  # this replica has its own error to raise
        return outcome

    def vote_with(self, row: Row, timeout_s: float | None, extra: int) -> Outcome:
        """Vote for the reduction of `row`, and reduce it as soon as all agree. **Collective**."""
        signature = row.reduction.signature
        digest = signature.digest
        if digest is None:
            digest = digest_of(signature)
        vote = _Vote(_CALL, digest ^ extra, signature, timeout_s, extra, row)
        outcome: Outcome = self._meet("agreement", vote, self._vote_as_rank)
        return outcome

    def reduce_row(self, row: Row) -> None:
        """Reduce `row` with the rows of the other replicas of this rank. **Collective**."""
        self._meet("reduction", row, self._reduce_rows)

    def _reduce_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Reduce the rows of this rank's replicas with the rows of other ranks. **Collective**."""
        try:
            lent = reduce_rows(self, rows)
        except BaseException as error:
            self.leave_data(error)
            raise
        if lent is not None and rows[0].use is not None:
            rows[0].use(lent)
        return rows

    def _vote_as_rank(self, votes: list[_Vote]) -> list[Outcome]:
        """Cast the vote of this rank's replicas, or one for a disagreement. **Collective**."""
        ranks, num_votes = self._ranks, len(votes)
        status, digest, signature, timeout_s, extra, _ = votes[0]
        # Unpack all votes at once, because a rank may have many replicas.
        statuses, digests, _, _, _, rows = zip(*votes, strict=True)
        # If the replicas differ, their rank must still take part in the round, because the other
        # ranks wait for it.
        are_equal = digests.count(digest) == num_votes == statuses.count(status)
        if not are_equal:
            status, signature, extra = _CALL, _DIFFERENT, 0
        # Check this before the entry in the flight record, which lists collectives that have begun.
        ranks.check_open()
        # The signature of a refusal is shorter than that of a call: kind, name and owner.
        noted = signature if len(signature) > 2 else (*signature, *("",) * (3 - len(signature)))
        place = None if rows[0] is None else rows[0].place
        if place is None:
            place = users_place(sys._getframe())  # the calling thread is in the first replica
        entry = ranks.flight.begin(ranks.ledger, noted, "", place)
        is_agreed = False
        try:
            outcome = ranks.vote(status, signature, timeout_s, extra)
            is_agreed = are_equal and outcome is _ALL_CALL
        finally:
            if is_agreed:
                entry.agreed_ns = entry.ended_ns = entry.began_ns
                entry.state = State.DONE
            else:
                entry.state = State.FAILED if status is _CALL else State.REFUSED
        # If a replica has not passed a row yet, all of them wait again to reduce the rows.
        if is_agreed and None not in rows:
            self._reduce_rows(rows)
        # If the replicas of every rank differ, all ranks vote `_DIFFERENT` and so agree. It is
        # still a disagreement.
        return [outcome if are_equal else Outcome.MIXED] * len(votes)

    def leave_interrupted(self, what: str, error: BaseException) -> None:
        """Close the channel, unless the replica ends because a different one here has failed."""
        # The failed replica reports itself, and may have failed after the data was transferred.
        if not isinstance(error, Cancelled):
            super().leave_interrupted(what, error)

    def leave_data(self, error: BaseException) -> None:
        """Report that this rank stops sending data for which the others wait."""
        if self.closed is None and not isinstance(error, Cancelled):
            self._ranks.leave_interrupted(f"transfer of data in {self.inside}", error)

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every replica, in order. **Collective**, unchecked."""
        values: list[Any] = self._meet("exchange", value, self._exchange_all)
        return values

    def _exchange_all(self, values: list[Any]) -> list[list[Any]]:
        """Exchange the values once per rank, so that not every replica parses all values."""
        found = [each for of_rank in self._ranks.exchange(values) for each in of_rank]
        # Give each replica its own list, because it may change the list.
        return [list(found) for _ in values]

    def report(
        self, what: str, site: str, *, ended: bool = False, cause: bool = False
    ) -> dict[str, Any]:
        """Return the report of this replica for a disagreement."""
        return super().report(what, site, ended=ended, cause=cause) | {"replica": self.rank}

    def exchange_reports(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all replicas after a mixed round. **Collective**."""
        if self.closed is not None:  # the reports have been exchanged already
            return []
        reports: list[Any] = self._meet("reports", report, self._exchange_reports)
        return reports

    def _exchange_reports(self, reports: list[dict[str, Any]]) -> list[list[Any]]:
        """Exchange reports. If a rank runs no replica, its report stands for all its replicas."""
        assert isinstance(self.transport, ReplicaTransport)
        of_ranks = self._ranks.exchange_reports(_report_of_rank(self._ranks, reports))
        # `disagreement` needs one report per rank, but its argument has one per replica.
        self._ranks.reports = of_ranks
        found = [
            report
            for share, of_rank in zip(self.transport.shares, of_ranks, strict=True)
            for report in of_rank.get("replicas", [of_rank] * len(share))
        ]
        return [found] * len(reports)

    def disagreement(self, reports: Sequence[dict[str, Any]]) -> CollectiveError:
        """Close the channel of the ranks, and return the error to raise for their reports."""
        if self.closed is None:
            error = disagreement_error(self._ranks.reports, self._ranks.rank)
            self.closed = error
        known = self.closed
        assert isinstance(known, CollectiveError)
        # Each replica raises its own error, in its own thread and with its own traceback.
        error = type(known)(str(known))
        error._caused_elsewhere = known._caused_elsewhere
        return error

    def place(self, rank: int | None = None) -> str:
        """Return the name of a replica, by default this one, for messages."""
        return f"replica {self.rank if rank is None else rank} of {self.size}"

    def note_failure(self, error: BaseException, site: str) -> None:
        """Record that a function raised on this rank."""
        self._ranks.note_failure(error, site)


def _report_of_rank(ranks: Channel, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of a rank from the `reports` of its replicas."""
    lines: dict[tuple[str, str], list[int]] = {}
    for report, call in zip(reports, calls_with_structures(reports), strict=True):
        lines.setdefault((call, report["site"]), []).append(report["replica"])
    (what, site) = next(reversed(lines))
    cause = any(report["cause"] for report in reports) or len(lines) > 1
    if len(lines) > 1:
        what, site = _joined([(_at(w, which), s, which) for (w, s), which in lines.items()])
    own = ranks.report(what, site, cause=cause)
    if len(lines) == 1:  # the ranks may differ in it
        own["structure"] = reports[0].get("structure", "")
    verdicts = {str(report.get("verdict")): report.get("verdict") for report in reports}
    if len(verdicts) == 1 and None not in verdicts.values():
        own["verdict"] = reports[0]["verdict"]
    return own | {"replicas": list(reports)}


def _joined(lines: Sequence[tuple[str, str, list[int]]]) -> tuple[str, str]:
    """Return a text on all `lines`, each about several replicas, and the last line's place."""
    texts = [
        f"{_replica_list(which)} {what}" + (f" at {site}" if site else "")
        for what, site, which in lines[:-1]
    ]
    what, site, which = lines[-1]
    return ", ".join([*texts, f"{_replica_list(which)} {what}"]), site


def _at(what: str, replicas: Sequence[int]) -> str:
    return f"{'are' if len(replicas) > 1 else 'is'} at {what}"


def _replica_list(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


def replicas_disagree(
    ranks: Channel, returned: Sequence[int], waiting: Sequence[tuple[int, str, Any, str]]
) -> CollectiveError:
    """Close `ranks`, and return the error for replicas of this rank that wait for different things.

    **Collective**. `waiting` has, for each replica that waits, its number, the call in which it
    waits, the value that it has passed, and its place in the program.
    """
    lines: dict[tuple[str, str], list[int]] = {}
    for replica, what, given, site in waiting:
        named = _call_text(given.signature) if isinstance(given, _Vote) else what
        lines.setdefault((named, site), []).append(replica)
    texts = [(_at(what, which), site, which) for (what, site), which in lines.items()]
    if returned:
        texts.insert(0, ("returned", "", list(returned)))
    # The other ranks may be waiting in a round. A rank whose replicas agree never votes with this
    # signature, so they learn that something is wrong here.
    ranks.vote(Status.CALL, _DIFFERENT, None)
    report = ranks.report(*_joined(texts), cause=True)
    return ranks.disagreement(ranks.exchange_reports(report))


def _call_text(signature: Sequence[Any]) -> str:
    kind, name, *rest = [*signature, None, None][: max(len(signature), 2)]
    return format_call(kind, name, [each for each in rest[1:] if each is not None])
