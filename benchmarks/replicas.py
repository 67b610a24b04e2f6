"""Benchmark of replicas apart from ranks: steps, meetings, and sums in one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.small_network import Batch, backward, cross_entropy, forward, random_batch
from benchmarks.step import PackageLoop
from mpistrat.bench.benchmark import (
    RESULTS,
    Bars,
    Benchmark,
    Choices,
    Column,
    Findings,
    Row,
    Table,
)
from mpistrat.bench.measure import take_turns
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.packing import Message
from mpistrat.comm.shared_reducer import RowOrder, SharedMemoryReducer
from mpistrat.options import CommunicationOptions, ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.replicas.arithmetic import fingerprint
from mpistrat.strategies import MPIStrategy, OneDeviceStrategy, Strategy, get_replica_context

_SHARE = 4
"""Replicas on each rank, in the steps with several."""
_LOCAL = (2, 4, 8)
_IN_ONE_RUN = 20
"""Meetings of a run, where there are several."""


class AccumulatingLoop(PackageLoop):
    """The step of `PackageLoop` with its gradients added up by hand over parts of the batch."""

    def __init__(self, strategy: Strategy, parts: Sequence[Batch]) -> None:
        super().__init__(strategy, parts[0])
        self._parts = parts

    def step(self) -> None:
        """Make one step. **Collective**."""
        self._strategy.run(self._accumulate)

    def _accumulate(self) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        weights = self.weights()
        count = sum(len(part.label) for part in self._parts)
        global_batch_size = int(replica.all_reduce(ReduceOp.SUM, count))
        totals: list[np.ndarray] = []
        for part in self._parts:
            logits, tape = forward(weights, part.image)
            losses, error = cross_entropy(logits, part.label)
            gradients = backward(weights, tape, error / global_batch_size)
            for total, gradient in zip(totals, gradients, strict=False):
                total += gradient
            totals = totals or gradients
            self._loss.update_state(losses)
            self._accuracy.update_state(part.label, logits.argmax(axis=1))
        self._optimizer.apply_gradients(zip(totals, self._variables, strict=True))


def replica_loop(strategy: Strategy) -> PackageLoop:
    """Return the loop of `PackageLoop` on the replicas of `strategy`."""
    num_replicas = strategy.num_replicas_in_sync

    def part(take: Callable[[Batch], np.ndarray]) -> np.ndarray:
        made: np.ndarray = strategy.experimental_distribute_values_from_function(
            lambda at: take(random_batch(at.replica_id_in_sync_group, num_replicas))
        )
        return made

    size = random_batch(0, num_replicas).global_size
    batch = Batch(part(lambda each: each.image), part(lambda each: each.label), size)
    return PackageLoop(strategy, batch)


_STEPS = {
    "none": "a replica on each rank, without num_replicas=",
    "same": "num_replicas= the number of ranks",
    "several": f"{_SHARE} replicas on each rank",
    "by_hand": f"{_SHARE} parts a rank, accumulated by hand",
}


def measure(choices: Choices) -> Findings:
    """Time steps, meetings and reductions of replicas. **Collective** over COMM_WORLD."""
    plain = MPIStrategy(device="cpu")
    collectives = plain.extended._collectives
    rank, size = collectives.rank, collectives.size
    strategies = {
        "none": plain,
        "same": MPIStrategy(device="cpu", num_replicas=size),
        "several": MPIStrategy(device="cpu", num_replicas=_SHARE * size),
    }
    steps = {name: replica_loop(strategy).step for name, strategy in strategies.items()}
    parts = [random_batch(rank * _SHARE + each, size * _SHARE) for each in range(_SHARE)]
    steps["by_hand"] = AccumulatingLoop(plain, parts).step
    timings = take_turns(steps, collectives, choices.num_samples)
    over = {"same": "none", "several": "by_hand"}
    rows: list[Row] = [
        {"name": name, "step": label}
        | timings.time("step_s", name)
        | ({"ratio": timings.median_ratio(name, over[name])} if name in over else {})
        for name, label in _STEPS.items()
    ]
    meetings = _meetings(collectives, choices)
    sums: list[Row] = []
    notes: tuple[str, ...] = ()
    node = collectives.channel.transport.node
    if isinstance(node, SharedMemoryReducer):
        for num_bytes in choices.sizes:
            plain.run(lambda n=num_bytes: sums.append(_sums(node, n, collectives, choices)))
    else:
        notes = ("The ranks do not share the memory of one node: sums are left out.",)
    own = collectives.device
    start = take_turns({"it": partial(fingerprint.__wrapped__, own)}, collectives, 3)
    at_start: list[Row] = [
        {"what": "fingerprint of the arithmetic", "time_s": start.median_s("it")}
    ]
    for name in ("same", "several"):
        strategies[name].close()
    tables = {RESULTS: rows, "meetings": meetings, "sums": sums, "start": at_start}
    return Findings(tables, notes)


def _meetings(collectives: Collectives, choices: Choices) -> list[Row]:
    """Time what each further replica of a rank adds to a run, on each rank alone."""
    value = np.ones(1)

    def reduce_often(times: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        for _ in range(times):
            replica.all_reduce(ReduceOp.SUM, value)

    strategies = {each: OneDeviceStrategy(num_replicas=each) for each in (1, *_LOCAL)}
    rows: list[Row] = []
    calls = {
        f"{times} {each}": partial(strategy.run, reduce_often, args=(times,))
        for times in (1, _IN_ONE_RUN)
        for each, strategy in strategies.items()
    }
    calls |= {f"0 {each}": partial(made.run, bool) for each, made in strategies.items()}
    timings = take_turns(calls, collectives, choices.num_samples)
    for each in _LOCAL:
        row: dict[str, float] = {"num_replicas": each}
        for key, times in (("run_s", 0), ("first_s", 1), ("further_s", _IN_ONE_RUN)):
            more_s = timings.median_difference_s(f"{times} {each}", f"{times} 1") / (each - 1)
            row[key] = more_s / max(times, 1)
        rows.append(row)
    for strategy in strategies.values():
        strategy.close()
    return rows


def _sums(
    node: SharedMemoryReducer, num_bytes: int, collectives: Collectives, choices: Choices
) -> Row:
    """Time reductions in shared memory, whose ranks bring one piece or two. **Collective**."""
    replica, transport = get_replica_context(), collectives.channel.transport
    assert isinstance(replica, ReplicaContext)
    pairs = [[(2 * each, 1), (2 * each + 1, 1)] for each in range(transport.size)]
    order = RowOrder(2 * transport.size, pairs)
    as_usual, in_order = CommunicationOptions(), CommunicationOptions(deterministic=True)
    first, second = (np.full(num_bytes // 4, each, np.float32) for each in (0.1, 0.3))
    target = transport.pool.take(first.shape, first.dtype)
    message = Message([first], [target], transport.pool)
    rows, targets = [first, second], [target]
    timings = take_turns(
        {
            "default": partial(replica.all_reduce, ReduceOp.SUM, first, as_usual),
            "in_order": partial(replica.all_reduce, ReduceOp.SUM, first, in_order),
            "one": partial(node.all_reduce, ReduceOp.SUM, message),
            "two": partial(node.reduce_rows, ReduceOp.SUM, order, rows, targets, 1),
        },
        collectives,
        choices.num_samples,
    )
    return (
        {"num_bytes": num_bytes}
        | timings.time("default_s", "default")
        | timings.ratio("in_order", "in_order", "default")
        | timings.time("one_s", "one")
        | timings.ratio("two_pieces", "two", "one")
    )


BENCHMARK = Benchmark(
    "replicas",
    "replicas apart from ranks: steps, meetings, and sums in one tree",
    measure,
    (
        Table(
            (
                Column.text("a step of the digits network", "step"),
                Column.time("time", "step_s"),
                Column.speed_up("speed-up over none, by hand", "ratio"),
            )
        ),
        Table(
            (
                Column.text("replicas on one rank", "num_replicas"),
                Column.time("empty run", "run_s"),
                Column.time("one all_reduce", "first_s"),
                Column.time(f"each of {_IN_ONE_RUN}", "further_s"),
            ),
            "meetings",
            "What each further replica adds",
        ),
        Table(
            (
                Column.size("array", "num_bytes"),
                Column.time("default", "default_s"),
                Column.ratio("deterministic takes, times as long", "in_order"),
                Column.time("one piece a rank", "one_s"),
                Column.ratio("two pieces take, times as long", "two_pieces"),
            ),
            "sums",
            "Sums in the memory that ranks share",
        ),
        Table((Column.text("once a process", "what"), Column.time("time", "time_s")), "start"),
    ),
    (Bars(lambda row: str(row["step"]).replace(", ", ",\n"), {"step_s": "a step"}, "seconds"),),
    sizes=(2**16, 2**20, 2**23, 2**26),
)
