"""Scaling benchmark of reductions: counted messages, and a model of the time.

Times of ranks that share a core mean nothing. So what the package sends is counted on any number
of ranks, and times are taken only where each rank has its own core; the model fitted to them
predicts the time on many nodes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Column,
    Findings,
    Lines,
    Row,
    Table,
)
from mpistrat.bench.measure import NUM_PARAMETERS, facts_of_last_collective
from mpistrat.mpi.world import World, open_world
from mpistrat.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.system.cpu import num_cores
from mpistrat.system.text import readable_size
from tools.scaling.model import TERMS, Constants, Fit, fit
from tools.scaling.probes import Sample, measure_samples
from tools.scaling.work import package_all_reduce

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["BENCHMARK", "NETWORK_BYTES_PER_S", "NETWORK_LATENCY_S", "predictions", "rank_counts"]

NETWORK_LATENCY_S = 2e-6
NETWORK_BYTES_PER_S = 12.5e9
"""Assumed links between nodes where all ranks share one: about those of 100 Gbit/s."""

_NUM_NODES = (64, 1024)
_PREDICTED_SIZES = (8, 2**20, 4 * NUM_PARAMETERS)
_FITTED_SIZES = (8, 2**10, 2**16, 2**20, 2**23)
_DETERMINISTIC = CommunicationOptions(
    deterministic=True, implementation=CommunicationImplementation.MPI
)
_WAYS = ("raw Allreduce", "all_reduce", "all_reduce, deterministic")
_POLL_S = 0.002


def measure(choices: Choices) -> Findings:
    """Count what all-reductions send, time, fit and predict. **Collective** over COMM_WORLD."""
    world = open_world(None)
    # One rank of each node first, so that small groups measure the network where there is one.
    ordered = _split(world.comm, 0, world.local_rank * world.size + world.rank)
    counts: list[Row] = []
    samples: list[Sample] = []
    for group in _groups(ordered):
        counts += _count(group, choices.sizes)
        if _has_cores(world, group.size):
            samples += measure_samples(group, _FITTED_SIZES, choices.num_samples)
    if not samples:
        note = "There are no two ranks with a core each, so no time is taken and nothing predicted."
        return Findings({RESULTS: counts}, (note,))
    fitted = fit([(work, seconds) for _, _, work, seconds in samples])
    has_network = _num_machines(world) > 1
    tables = {
        RESULTS: counts,
        "times": _sample_rows(samples, fitted.constants),
        "constants": [_constants_row(fitted)],
        "predictions": predictions(fitted.constants, has_network),
    }
    note = (
        "All ranks share a machine. For the links between nodes, "
        f"{NETWORK_LATENCY_S * 1e6:g} us and {NETWORK_BYTES_PER_S / 1e9:g} GB/s are assumed."
    )
    return Findings(tables, () if has_network else (note,))


def rank_counts(size: int) -> list[int]:
    """Return 1, 2, 4, ... below `size`, and `size`."""
    return [*(1 << k for k in range((size - 1).bit_length())), size]


def _groups(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """Yield the first 1, 2, 4, ... ranks of `comm` on their members. **Collective**."""
    from mpi4py import MPI

    for num_ranks in rank_counts(comm.size):
        group = _split(comm, 0 if comm.rank < num_ranks else MPI.UNDEFINED, comm.rank)
        if group != MPI.COMM_NULL:
            yield group
        # The other ranks sleep meanwhile, which leaves the cores to the group.
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(_POLL_S)


def _split(comm: MPI.Intracomm, color: int, key: int) -> MPI.Intracomm:
    return cast("MPI.Intracomm", comm.Split(color, key))


def _has_cores(world: World, num_ranks: int) -> bool:
    """Return whether the first `num_ranks` of the ordered world have their own cores and links."""
    num_machines = _num_machines(world)
    return 2 <= num_ranks <= (num_cores() if num_machines == 1 else num_machines)


def _num_machines(world: World) -> int:
    """Return the number of machines, of which one may count as several nodes."""
    return len(set(world.hosts))


def _count(group: MPI.Intracomm, sizes: Sequence[int]) -> list[Row]:
    """Return the rows of what one all-reduction of each size and way sends on this rank."""
    from tools.scaling.counting import MpiCall, counted, total_work

    calls: list[MpiCall] = []
    comm = counted(group, calls)
    strategy = MPIStrategy(comm, device="cpu")
    rows: list[Row] = []

    def count_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.ones(num_bytes // 4, np.float32)
        result = np.empty_like(array)
        reductions: tuple[Callable[[], object], ...] = (
            lambda: comm.Allreduce(array, result),
            lambda: replica.all_reduce(ReduceOp.SUM, array),
            lambda: replica.all_reduce(ReduceOp.SUM, array, _DETERMINISTIC),
        )
        for way, reduce in zip(_WAYS, reductions, strict=True):
            reduce()  # the first call may set up what later ones use
            calls.clear()
            facts = facts_of_last_collective(reduce)
            work = total_work(calls)
            rows.append(
                {
                    "num_ranks": group.size,
                    "num_bytes": num_bytes,
                    "way": way,
                    "mpi_calls": len(calls),
                    "messages": work.messages,
                    "bytes_sent": work.bytes_sent,
                    "bytes_over_array": work.bytes_sent / num_bytes,
                    "operations": [f"{call.operation} {call.num_bytes}" for call in calls],
                    **facts,
                }
            )

    for num_bytes in sizes:
        strategy.run(count_size, args=(num_bytes,))
    return rows


def _sample_rows(samples: Sequence[Sample], constants: Constants) -> list[Row]:
    return [
        {
            "operation": operation,
            "num_bytes": num_bytes,
            "work": dataclasses.asdict(work),
            "measured_s": seconds,
            "predicted_s": constants.predict_s(work),
        }
        for operation, num_bytes, work, seconds in samples
    ]


def _constants_row(fitted: Fit) -> Row:
    return {
        **dataclasses.asdict(fitted.constants),
        "relative_error": fitted.relative_error,
        "num_samples": fitted.num_samples,
    }


def predictions(constants: Constants, has_network: bool) -> list[Row]:
    """Return the rows of predicted times of an `all_reduce` on many nodes with one rank each."""
    links = {"as measured": constants}
    if not has_network:  # the constants have latency and bandwidth of memory
        links["assumed network"] = dataclasses.replace(
            constants,
            message_s=NETWORK_LATENCY_S,
            sent_s_per_byte=1 / NETWORK_BYTES_PER_S,
        )
    rows: list[Row] = []
    for name, prices in links.items():
        for num_nodes in _NUM_NODES:
            for num_bytes in _PREDICTED_SIZES:
                work = package_all_reduce(num_nodes, num_bytes)
                rows.append(
                    {
                        "links": name,
                        "num_nodes": num_nodes,
                        "num_bytes": num_bytes,
                        "predicted_s": prices.predict_s(work),
                        "rules": prices.ruling_term(work),
                        **{f"{term}_s": part for term, part in prices.terms(work).items()},
                    }
                )
    return rows


@dataclass(frozen=True)
class _MessageLines(Lines):
    """Lines of messages over ranks, one for each way, for the longest array."""

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw them with a linear vertical axis, as messages grow with the logarithm of ranks."""
        largest = max(row["num_bytes"] for row in rows)
        by_ranks: dict[int, dict[str, Any]] = {}
        for row in rows:
            if row["num_bytes"] == largest:
                num_ranks = row["num_ranks"]
                point = by_ranks.setdefault(num_ranks, {"num_ranks": num_ranks})
                point[row["way"]] = row["messages"]
        super().draw(axes, list(by_ranks.values()))
        axes.set_yscale("linear")


@dataclass(frozen=True)
class _TermBars:
    """Bars of predicted times, each divided into the shares of the model's terms."""

    table: str
    title: str
    y_label: str

    def height(self, rows: Sequence[Row]) -> float:
        """Return how many inches the rows need."""
        return 4.2

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw one bar for each prediction."""
        axes.set_ylabel(self.y_label)
        places, tops = range(len(rows)), [0.0] * len(rows)
        for term in TERMS:
            shares = [row[f"{term}_s"] / row["predicted_s"] for row in rows]
            axes.bar(places, shares, 0.8, bottom=tops, label=term)
            tops = [top + share for top, share in zip(tops, shares, strict=True)]
        axes.set_xticks(
            places, [_place(row) for row in rows], fontsize="small", rotation=30, ha="right"
        )


def _place(row: Row) -> str:
    return f"{row['links']}, {row['num_nodes']} nodes, {readable_size(row['num_bytes'])}"


def _rate(title: str, key: str) -> Column:
    return Column(title, lambda row: f"{1e-9 / row[key]:.2f} GB/s" if row[key] else "unlimited")


BENCHMARK = Benchmark(
    "scaling",
    "messages and bytes of a rank on 1, 2, 4, ... ranks, and a model of the time on many nodes",
    measure,
    (
        Table(
            (
                Column.text("ranks", "num_ranks"),
                Column.size("array", "num_bytes"),
                Column.text("way", "way"),
                Column.text("moved by", "implementation"),
                Column.text("calls of MPI", "mpi_calls"),
                Column("messages", lambda row: f"{row['messages']:,.0f}"),
                Column("bytes sent", lambda row: f"{row['bytes_sent']:,.0f}"),
                Column("bytes / array", lambda row: f"{row['bytes_over_array']:.2f}"),
            ),
            title="One all-reduction: messages one after the other, and their bytes",
        ),
        Table(
            (
                Column.time("a call", "call_s"),
                Column.time("a message", "message_s"),
                _rate("sent", "sent_s_per_byte"),
                _rate("reduced", "reduced_s_per_byte"),
                Column("error of the fit", lambda row: f"{row['relative_error']:.0%}"),
            ),
            "constants",
            "Constants, fitted to times on this machine",
        ),
        Table(
            (
                Column.text("links", "links"),
                Column.text("nodes", "num_nodes"),
                Column.size("array", "num_bytes"),
                Column.time("all_reduce", "predicted_s"),
                Column.text("what rules", "rules"),
            ),
            "predictions",
            "One all_reduce with one rank a node, as the model predicts",
        ),
    ),
    (
        _MessageLines(
            "num_ranks",
            {way: way for way in _WAYS},
            "ranks",
            "messages",
            title="messages one after the other, for the longest array",
        ),
        _TermBars("predictions", "what rules the predicted times", "share of the time"),
    ),
    sizes=(8, 2**20, 2**24),
)
