"""Benchmark of closures and remote variables, beside torch.distributed.rpc and mpi4py.futures."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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
from mpistrat.bench.measure import Timings
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.mpi.world import communicator
from mpistrat.parameter_server.server_strategy import ParameterServerStrategy
from mpistrat.pytorch import import_torch
from mpistrat.system.cpu import num_cores
from mpistrat.variables import Variable

_CALLS = 200
_SIZES = {"pull": (2**20, 2**26), "push": (2**20, 2**26)}
_NUM_CLOSURES, _CLOSURE_S = 1000, 0.005


class _State:
    """What the functions that workers run find on their rank."""

    comm: Any
    """Of rank 0 and 1, for the loops by hand."""
    variables: dict[int, Variable]
    """By size in bytes."""
    is_over = False
    """Whether the chief has made its remote calls."""


def measure(choices: Choices) -> Findings:
    """Time calls, pulls and pushes from the chief. **Collective** over COMM_WORLD."""
    world = communicator(None)
    pair = world.Split(0 if world.rank < 2 else 1, world.rank)
    _State.comm = pair
    strategy = ParameterServerStrategy()
    with strategy.scope():
        _State.variables = {
            num_bytes: Variable(np.zeros(num_bytes // 8), name=f"{num_bytes} bytes")
            for num_bytes in {size for sizes in _SIZES.values() for size in sizes}
        }
    has_rpc = all(world.allgather(_has_rpc()))
    findings = Findings({RESULTS: []}, ("One rank has no worker: start several.",))
    if world.size == 1:
        strategy.close()
    elif world.rank:
        strategy.serve()
    else:
        coordinator = ClusterCoordinator(strategy)
        calls, notes = _measure_calls(coordinator, has_rpc, choices.num_samples)
        values = _measure_values(coordinator, choices.num_samples)
        farm = _measure_farm(coordinator, min(choices.num_samples, 5))
        strategy.close()
        findings = Findings({RESULTS: calls, "values": values, "farm": farm}, notes)
    pair.Free()
    return findings


# Calls


def nothing() -> None:
    """Do nothing, as a closure does."""


def _end_rpc() -> None:
    _State.is_over = True


def _start_rpc(rank: int, port: int) -> Any:
    """Start PyTorch's rpc between the first two ranks, and return it. **Collective**."""
    # Once for each round: its threads slow down everything else on two cores.
    rpc = import_torch().distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def _serve_rpc(port: int) -> None:
    """Leave the core to the threads that answer remote calls."""
    _State.is_over = False
    rpc = _start_rpc(1, port)
    while not _State.is_over:
        time.sleep(0.001)
    rpc.shutdown()


def _has_rpc() -> bool:
    torch = import_torch()
    if torch is None or not torch.distributed.is_available():
        return False
    return bool(torch.distributed.rpc.is_available())


def _serve_futures() -> None:
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(_State.comm, root=0):
        pass


def _measure_calls(
    coordinator: ClusterCoordinator, has_rpc: bool, num_samples: int
) -> tuple[list[Row], tuple[str, ...]]:
    """Time empty calls on one worker, one after the other and many at once."""
    samples: dict[str, list[float]] = {}
    candidates = {"closure": _time_closures, "many": _time_many, "futures": _time_futures}
    if has_rpc:
        candidates["rpc"] = _time_rpc
    for turn in range(num_samples + 1):
        for name, timed in candidates.items():
            seconds = timed(coordinator)
            if turn:
                samples.setdefault(name, []).append(seconds)
    timings = Timings(samples)
    row: dict[str, Any] = {"call": "empty", **timings.medians()}
    row |= timings.ratio("closure_over_futures", "closure", "futures")
    notes: tuple[str, ...] = ("PyTorch's rpc is not installed on every rank.",)
    if has_rpc:
        notes = ()
        row |= timings.ratio("closure_over_rpc", "closure", "rpc")
        row |= timings.ratio("many_over_rpc", "many", "rpc")
    return [row], notes


def _time_closures(coordinator: ClusterCoordinator) -> float:
    return _seconds_of(lambda: coordinator.schedule(nothing).fetch())


def _time_many(coordinator: ClusterCoordinator) -> float:
    began = time.perf_counter()
    for _ in range(5 * _CALLS):
        coordinator.schedule(nothing)
    coordinator.join()
    return (time.perf_counter() - began) / (5 * _CALLS)


def _time_rpc(coordinator: ClusterCoordinator) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = _on_rank_1(coordinator, _serve_rpc, port)
    rpc = _start_rpc(0, port)
    seconds = _seconds_of(lambda: rpc.rpc_sync("rank1", nothing))
    rpc.rpc_sync("rank1", _end_rpc)
    rpc.shutdown()
    serving.fetch()
    return seconds


def _time_futures(coordinator: ClusterCoordinator) -> float:
    from mpi4py.futures import MPICommExecutor

    serving = _on_rank_1(coordinator, _serve_futures)
    with MPICommExecutor(_State.comm, root=0) as executor:  # None on other ranks than the root
        submit: Any = getattr(executor, "submit", None)
        seconds = _seconds_of(lambda: submit(nothing).result())
    serving.fetch()
    return seconds


def _on_rank_1(coordinator: ClusterCoordinator, function: Callable[..., Any], *args: Any) -> Any:
    """Schedule a function on the first worker, the only one that is asked while all are idle."""
    value = coordinator.schedule(function, args)
    coordinator.done()
    return value


def _seconds_of(call: Callable[[], object]) -> float:
    call()
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - began) / _CALLS


# Values


def pull(num_bytes: int, repeats: int) -> float:
    """Return the seconds of one read of a variable, on the worker."""
    variable = _State.variables[num_bytes]
    began = time.perf_counter()
    for _ in range(repeats):
        variable.value()
    return (time.perf_counter() - began) / repeats


def push(num_bytes: int, repeats: int) -> float:
    """Return the seconds of one write of a variable, on the worker."""
    variable, value = _State.variables[num_bytes], np.ones(num_bytes // 8)
    began = time.perf_counter()
    for _ in range(repeats):
        variable.assign(value, read_value=False)
    return (time.perf_counter() - began) / repeats


def raw(kind: str, num_bytes: int, repeats: int) -> float:
    """Return the seconds of one request and its answer by hand, on the worker."""
    comm, value, word = _State.comm, np.ones(num_bytes // 8), np.zeros(8)
    began = time.perf_counter()
    for _ in range(repeats):
        comm.Send(value if kind == "push" else word, 0)
        comm.Recv(value if kind == "pull" else word, 0)
    return (time.perf_counter() - began) / repeats


def _answer_by_hand(kind: str, num_bytes: int, repeats: int) -> None:
    comm, value, word = _State.comm, np.ones(num_bytes // 8), np.zeros(8)
    for _ in range(repeats):
        comm.Recv(value if kind == "push" else word, 1)
        comm.Send(value if kind == "pull" else word, 1)


def _measure_values(coordinator: ClusterCoordinator, num_samples: int) -> list[Row]:
    """Time pulls and pushes of whole variables, and messages of the same size by hand."""
    rows: list[Row] = []
    for kind, sizes in _SIZES.items():
        for num_bytes in sizes:
            repeats = 50 if num_bytes < 2**24 else 4
            samples: dict[str, list[float]] = {"ours": [], "raw": []}
            for turn in range(num_samples + 1):
                function = pull if kind == "pull" else push
                ours = _on_rank_1(coordinator, function, num_bytes, repeats).fetch()
                waiting = _on_rank_1(coordinator, raw, kind, num_bytes, repeats)
                _answer_by_hand(kind, num_bytes, repeats)
                by_hand = waiting.fetch()
                if turn:
                    samples["ours"].append(ours)
                    samples["raw"].append(by_hand)
            timings = Timings(samples)
            row: dict[str, Any] = {"kind": kind, "num_bytes": num_bytes, **timings.medians()}
            rows.append(row | timings.ratio("ours_over_raw", "ours", "raw"))
    return rows


# Many closures


def rest() -> None:
    """Take some milliseconds without a core."""
    time.sleep(_CLOSURE_S)


def compute() -> None:
    """Take some milliseconds of a core."""
    end = time.thread_time() + _CLOSURE_S
    while time.thread_time() < end:
        pass


def _measure_farm(coordinator: ClusterCoordinator, num_samples: int) -> list[Row]:
    """Time many short closures on all workers, and compare with the least time possible."""
    num_workers = coordinator.strategy.size - 1
    rows: list[Row] = []
    for function, at_once in (
        (rest, num_workers),
        (compute, min(num_workers, num_cores())),
    ):
        samples = []
        for _ in range(num_samples):
            began = time.perf_counter()
            for _ in range(_NUM_CLOSURES):
                coordinator.schedule(function)
            coordinator.join()
            samples.append(time.perf_counter() - began)
        ideal_s = _NUM_CLOSURES * _CLOSURE_S / at_once
        timings = Timings({"ours": samples, "ideal": [ideal_s] * num_samples})
        row: dict[str, Any] = {
            "kind": function.__name__,
            "num_workers": num_workers,
            **timings.medians(),
        }
        rows.append(row | timings.ratio("ours_over_ideal", "ours", "ideal"))
    return rows


BENCHMARK = Benchmark(
    "coordinator",
    "closures of a parameter-server job, and reads and writes of its variables",
    measure,
    (
        Table(
            (
                Column.time("closure", "closure_s"),
                Column.time("of many", "many_s"),
                Column.time("torch rpc", "rpc_s"),
                Column.time("mpi4py.futures", "futures_s"),
                Column.speed_up("speed-up over rpc", "closure_over_rpc"),
                Column.speed_up("over futures", "closure_over_futures"),
            ),
            title="An empty call on one worker",
        ),
        Table(
            (
                Column.text("", "kind"),
                Column.size("variable", "num_bytes"),
                Column.time("ours", "ours_s"),
                Column.time("by hand", "raw_s"),
                Column.speed_up("speed-up", "ours_over_raw"),
            ),
            "values",
            "A variable of the chief, from a worker",
        ),
        Table(
            (
                Column.text("closures", "kind"),
                Column.text("workers", "num_workers"),
                Column.time("1,000 of 5 ms", "ours_s"),
                Column.time("ideal", "ideal_s"),
                Column.speed_up("share of the ideal rate", "ours_over_ideal"),
            ),
            "farm",
            "Many closures",
        ),
    ),
    (
        Bars(
            lambda row: "empty call",
            {"closure_s": "closure", "rpc_s": "torch rpc", "futures_s": "mpi4py.futures"},
            "seconds",
        ),
    ),
)
