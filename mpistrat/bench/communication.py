"""Benchmarks of reductions: a single array, the gradients of a network, the cost of agreement."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat import context
from mpistrat.bench.benchmark import (
    RESULTS,
    Bars,
    Benchmark,
    Choices,
    Column,
    Findings,
    Lines,
    Row,
    Table,
)
from mpistrat.bench.measure import SHAPES, facts_of_last_collective, random_arrays, take_turns
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.mpi.world import open_world
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context


def measure_allreduce(choices: Choices) -> Findings:
    """Time all-reductions of one float32 array of each size. **Collective** over COMM_WORLD."""
    strategy = MPIStrategy(device=choices.device)
    xp, collectives = strategy.extended.xp, context.collectives_of(strategy)
    from mpi4py import MPI  # importing it starts MPI, which the strategy does

    comm = open_world(None).comm
    rows: list[Row] = []

    def measure_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        host = np.full(num_bytes // 4, comm.rank, np.float32)
        array = xp.asarray(host)
        own_zeros, target = xp.zeros_like(array), xp.empty_like(array)
        ready = np.empty_like(host)
        zeros = np.zeros_like(host)  # the sum is the same however often it is reduced
        # Raw MPI reduces into a ready buffer, or in place, which overwrites its input. Ours reduces
        # into a new array, with all checks on. All ranks copy at the same time, and so read and
        # write each byte as fast as memory allows. Raw MPI gets host memory, which every MPI
        # library supports.
        timings = take_turns(
            {
                "raw": lambda: comm.Allreduce(host, ready),
                "in_place": lambda: comm.Allreduce(MPI.IN_PLACE, zeros),
                "ours": lambda: replica.all_reduce(ReduceOp.SUM, array),
                "out": lambda: replica.all_reduce(ReduceOp.SUM, own_zeros, out=own_zeros),
                "copy": lambda: xp.copyto(target, array),
            },
            collectives,
            choices.num_samples,
        )
        facts = facts_of_last_collective(lambda: replica.all_reduce(ReduceOp.SUM, array))
        row = {
            "num_bytes": num_bytes,
            "ratio": timings.median_ratio("raw", "ours"),
            "in_place_ratio": timings.median_ratio("in_place", "ours"),
            "out_ratio": timings.median_ratio("in_place", "out"),
            "extra_s": timings.median_difference_s("ours", "raw"),
            "ours_over_copy": timings.median_ratio("ours", "copy"),
            "raw_over_copy": timings.median_ratio("raw", "copy"),
            "copy_bytes_per_s": 2 * num_bytes / timings.median_s("copy"),
        }
        moved = _moved_bytes(strategy, num_bytes, facts.get("implementation", ""))
        if moved is not None:
            # A copy reads and writes each byte.
            floor_s = moved / (2 * num_bytes) * timings.median_s("copy")
            row |= {"moved_bytes": moved, "memory_share": floor_s / timings.median_s("ours")}
        rows.append(row | timings.medians() | facts)

    for num_bytes in choices.sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return Findings({RESULTS: rows}, notes_on(strategy))


def notes_on(strategy: MPIStrategy) -> tuple[str, ...]:
    """Return notes about a comparison with raw MPI, which gets host memory."""
    device = strategy.extended.device
    if device.kind == "cpu":
        return ()
    return (
        f"mpistrat reduces and copies arrays on {device} ({device.describe_gpu()}). Raw MPI "
        "reduces arrays in host memory.",
    )


def _moved_bytes(strategy: MPIStrategy, num_bytes: int, implementation: str) -> int | None:
    """Return how many bytes a rank reads and writes for one array, or ``None`` if unknown."""
    transport = context.collectives_of(strategy).channel.transport
    if implementation == "Piggyback":  # each rank writes its numbers, and reads all numbers
        return (2 + transport.size) * num_bytes
    if isinstance(transport.node, SharedMemoryReducer) and implementation == "SharedMemoryReducer":
        return transport.node.moved_bytes(num_bytes, transport.pool.shares(num_bytes))
    return None


_MOVED_BY = {
    "Piggyback": "in the message of the checks",
    "SharedMemoryReducer": "shared memory",
    "HierarchicalReducer": "shared memory in nodes, MPI between",
    "MpiReducer": "MPI_Allreduce",
    "ReduceScatterReducer": "MPI, reduced by mpistrat",
    "NcclReducer": "NCCL",
    "StagedReducer": "through host memory",
    "DirectReducer": "CUDA-aware MPI",
}
"""Short descriptions of the reducers."""


def _moved_by(row: Row) -> str:
    name = str(row.get("implementation", "-"))
    return _MOVED_BY.get(name, name)


ALLREDUCE = Benchmark(
    "allreduce",
    "all_reduce of one array, compared with raw MPI and a copy",
    measure_allreduce,
    (
        Table(
            (
                Column.size("size", "num_bytes"),
                Column.time("mpi4py", "raw_s"),
                Column.time("mpistrat", "ours_s"),
                Column.ratio("speed-up", "ratio"),
                Column("how", _moved_by),
            ),
            more_columns=(
                Column.time("mpi4py in place", "in_place_s"),
                Column.ratio("speed-up over in place", "in_place_ratio"),
                Column.time("mpistrat with out=", "out_s"),
                Column.ratio("its speed-up over in place", "out_ratio"),
                Column.time("one copy", "copy_s"),
                Column.size("read and written", "moved_bytes"),
                Column.ratio("share of copy speed", "memory_share"),
                Column.text("implementation", "implementation"),
                Column.text("why", "why"),
            ),
        ),
    ),
    (
        Lines(
            "num_bytes",
            {
                "raw_s": "raw Allreduce",
                "in_place_s": "raw Allreduce in place",
                "ours_s": "all_reduce",
                "out_s": "all_reduce with out=",
                "copy_s": "one copy",
            },
            "size of the array",
            "seconds",
        ),
    ),
    sizes=(8, 2**10, 2**16, 2**20, 2**22, 2**24, 2**26),
    runs_on_devices=True,
)


# The smaller case comes first, because the peak memory of a process never goes down.
_CASES: dict[str, Sequence[tuple[int, ...]]] = {
    "1,000 arrays of 100 floats": ((100,),) * 1000,
    f"ResNet-50, {len(SHAPES)} arrays": SHAPES,
}


def measure_gradients(choices: Choices) -> Findings:
    """Time the reduction of the float32 gradients of networks. **Collective** over COMM_WORLD."""
    strategy = MPIStrategy(device=choices.device)
    xp, collectives = strategy.extended.xp, context.collectives_of(strategy)
    comm = open_world(None).comm
    rows: list[Row] = []

    def measure_case(case: str) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        on_host = random_arrays(_CASES[case])
        arrays = [xp.asarray(array) for array in on_host]
        num_bytes = sum(array.nbytes for array in arrays)
        grown = _peak_growth(lambda: replica.all_reduce(ReduceOp.SUM, arrays), collectives)
        ready = [np.empty_like(array) for array in on_host]
        joined = np.concatenate([array.reshape(-1) for array in on_host])
        joined_ready = np.empty_like(joined)

        def raw() -> None:
            for array, result in zip(on_host, ready, strict=True):
                comm.Allreduce(array, result)

        candidates: dict[str, Callable[[], object]] = {
            "raw": raw,
            "ours": lambda: replica.all_reduce(ReduceOp.SUM, arrays),
            # The speed that packing could reach if it cost nothing.
            "joined": lambda: comm.Allreduce(joined, joined_ready),
        }
        timings = take_turns(candidates, collectives, choices.num_samples)
        row = {
            "gradients": case,
            "num_arrays": len(arrays),
            "num_bytes": num_bytes,
            **timings.ratio("ratio", "raw", "ours"),
            "ours_over_joined": timings.median_ratio("ours", "joined"),
            **timings.ratio("joined_ratio", "joined", "ours"),
        }
        if collectives.device.kind == "cpu":  # only host memory is counted
            row["extra_bytes"] = max(grown - num_bytes, 0)
        rows.append(row | timings.medians())

    for case in _CASES:
        strategy.run(measure_case, args=(case,))
    return Findings({RESULTS: rows}, notes_on(strategy))


def _peak_growth(call: Callable[[], object], collectives: Collectives) -> int:
    """Return by how many bytes two calls raise the peak memory of a rank. **Collective**."""
    # Drop the first result before the second call, as in a training loop.
    before = _peak_bytes()
    call()
    call()
    return int(max(collectives.gather_json(_peak_bytes() - before)))


def _peak_bytes() -> int:
    """Return the peak resident memory of this process, including shared pages."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


GRADIENTS = Benchmark(
    "gradients",
    "the gradients of a network in one all_reduce, compared with a loop of raw MPI",
    measure_gradients,
    (
        Table(
            (
                Column.text("gradients", "gradients"),
                Column.size("together", "num_bytes"),
                Column.time("loop of raw Allreduce", "raw_s"),
                Column.time("one all_reduce", "ours_s"),
                Column.ratio("times faster", "ratio"),
                Column.time("one raw, joined", "joined_s"),
                Column.ratio("all_reduce / joined", "ours_over_joined"),
                Column.size("memory besides the results", "extra_bytes"),
            )
        ),
    ),
    (
        Bars(
            lambda row: str(row["gradients"]),
            {"ratio": "loop of raw Allreduce", "joined_ratio": "one raw Allreduce, joined"},
            "times one all_reduce",
            line_at=1.0,
        ),
    ),
    runs_on_devices=True,
)


def measure_agreement(choices: Choices) -> Findings:
    """Time all-reductions of a float32 array with and without checks. **Collective**."""
    strategy = MPIStrategy(device="cpu")
    collectives = context.collectives_of(strategy)
    channel = collectives.channel
    rows: list[Row] = []

    def measure_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.ones(num_bytes // 4, np.float32)

        def reduced(checks: bool) -> Callable[[], object]:
            def reduce() -> None:
                channel.checks = checks
                replica.all_reduce(ReduceOp.SUM, array)
                channel.checks = True

            return reduce

        candidates = {"checked": reduced(True), "unchecked": reduced(False)}
        timings = take_turns(candidates, collectives, choices.num_samples)
        cost_s = timings.median_difference_s("checked", "unchecked")
        row = {"num_bytes": num_bytes, "cost_s": cost_s}
        row |= {"cost_ratio": cost_s / timings.median_s("unchecked")}
        rows.append(row | timings.medians())

    for num_bytes in choices.sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return Findings({RESULTS: rows})


AGREEMENT = Benchmark(
    "agreement",
    "what the checks add to an all_reduce",
    measure_agreement,
    (
        Table(
            (
                Column.size("array", "num_bytes"),
                Column.time("with checks", "checked_s"),
                Column.time("without", "unchecked_s"),
                Column.time("cost", "cost_s"),
                Column.ratio("cost / without", "cost_ratio"),
            )
        ),
    ),
    (
        Lines(
            "num_bytes",
            {"checked_s": "with checks", "unchecked_s": "without"},
            "size of the array",
            "seconds",
        ),
    ),
    sizes=(8, 2**16, 2**20, 2**24),
)
