"""One training step through the whole package, beside the same step by its peers."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Findings,
    Row,
    Table,
    ratio,
    text,
    time,
)
from mpistrat.bench.ddp import DdpLoop, open_ddp_loop
from mpistrat.bench.digits import random_batch
from mpistrat.bench.loops import HandwrittenLoop, Loop, PackageLoop
from mpistrat.bench.pictures import Bars
from mpistrat.bench.timing import Timings, take_turns
from mpistrat.sharding import ceil_div
from mpistrat.strategies import MPIStrategy
from mpistrat.world import World, open_world

__all__ = ["BENCHMARK"]

_WORDS = {
    "ours": "mpistrat",
    "hand": "by hand: mpi4py and NumPy",
    "ddp": "PyTorch DDP over gloo",
    "run": "strategy.run of an empty function",
}


def measure(choices: Choices) -> Findings:
    """Time training steps of the digits network, data aside. **Collective** over COMM_WORLD.

    Each loop learns from the same batch of 128 examples over all ranks, with momentum, and keeps
    loss and accuracy. By hand there is one ``Allreduce`` for each array and no check of anything.
    """
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended.collectives
    world = open_world(None)
    batch = random_batch(world.rank, world.size)
    loops: dict[str, Loop] = {
        "ours": PackageLoop(strategy, batch),
        "hand": HandwrittenLoop(world.comm, batch),
    }
    candidates: dict[str, Callable[[], object]] = {name: loop.step for name, loop in loops.items()}
    ranks_per_node = ceil_div(world.size, len(world.hosts))
    ddp = open_ddp_loop(collectives, _host_of_rank_0(world), ranks_per_node, batch)
    if isinstance(ddp, DdpLoop):
        candidates["ddp"] = ddp.step
    candidates["run"] = lambda: strategy.run(_nothing)
    timings = take_turns(candidates, collectives, choices.num_samples)
    if isinstance(ddp, DdpLoop):
        ddp.close()
    rows = [_row(name, timings) for name in candidates]
    return Findings({RESULTS: rows}, () if isinstance(ddp, DdpLoop) else (ddp,))


def _nothing() -> None:
    pass


def _host_of_rank_0(world: World) -> str:
    return "127.0.0.1" if len(world.hosts) == 1 else world.hosts[0]


def _row(name: str, timings: Timings) -> Row:
    row = {"name": name, "loop": _WORDS[name], "step_s": timings.median_s(name)}
    if name == "run":
        return row
    return row | {
        "over_hand": timings.median_ratio(name, "hand"),
        "over_ours": timings.median_ratio(name, "ours"),
    }


BENCHMARK = Benchmark(
    "step",
    "one training step of a small network, beside a loop by hand and PyTorch DDP",
    measure,
    (
        Table(
            (
                text("loop", "loop"),
                time("a step", "step_s"),
                ratio("/ by hand", "over_hand"),
                ratio("/ mpistrat", "over_ours"),
            )
        ),
    ),
    (Bars(lambda row: str(row["loop"]).replace(": ", ":\n"), {"step_s": "a step"}, "seconds"),),
)
