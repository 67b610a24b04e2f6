"""Benchmark of the PyTorch backend: its calls and DDP steps, compared with gloo."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

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
from mpistrat.mpi.world import open_world
from mpistrat.options import ReduceOp
from mpistrat.pytorch import import_torch
from mpistrat.strategies import MPIStrategy
from mpistrat.system.cpu import num_cores
from mpistrat.system.text import readable_size

_OURS, _GLOO = "mpistrat", "gloo"
_STEPS, _PARTS = "steps", "parts"
_WIDTHS = {
    "0.1 million": (64, 256, 256, 64),
    "5 million": (512, 1536, 1536, 1536, 64),
    "25 million": (1024, 3072, 3072, 3072, 1024),
}
"""Layers of the networks, by their number of parameters."""
_BATCH = 16
"""Examples of each rank: few, so that the reduction is not hidden by products of matrices."""


def measure(choices: Choices) -> Findings:
    """Time calls and steps over both backends in turns. **Collective** over COMM_WORLD."""
    collectives = MPIStrategy(device="cpu").extended._collectives
    torch = import_torch()
    if not all(collectives.gather_json(torch is not None)):
        return Findings({RESULTS: []}, ("PyTorch is not installed on every rank.",))
    from mpistrat.torch import init

    world = open_world(None)
    torch.set_num_threads(max(1, num_cores() // len(world.ranks_of_node)))
    ours = init()
    groups = {_GLOO: torch.distributed.new_group(backend="gloo"), _OURS: ours}
    calls = [
        _time_calls(torch, num_bytes, groups, collectives, choices) for num_bytes in choices.sizes
    ]
    steps = [_time_steps(torch, name, groups, collectives, choices) for name in _WIDTHS]
    parts = [
        row
        for num_bytes in (min(choices.sizes), 2**20)
        for row in _time_parts(torch, num_bytes, ours, collectives, choices)
    ]
    torch.distributed.destroy_process_group()
    return Findings({RESULTS: calls, _STEPS: steps, _PARTS: parts})


def _time_calls(
    torch: Any, num_bytes: int, groups: dict[str, Any], collectives: Collectives, choices: Choices
) -> Row:
    tensor = torch.zeros(num_bytes // 4)
    candidates: dict[str, Callable[[], object]] = {}
    for name, group in groups.items():
        call = functools.partial(torch.distributed.all_reduce, tensor, group=group)
        candidates[name] = call
        candidates[f"{name}_async"] = functools.partial(_start_and_wait, call)
    timings = take_turns(candidates, collectives, choices.num_samples)
    return {
        "num_bytes": num_bytes,
        **timings.medians(),
        **timings.ratio("ratio", _OURS, _GLOO),
        **timings.ratio("async_ratio", f"{_OURS}_async", f"{_GLOO}_async"),
    }


def _start_and_wait(call: Callable[..., Any]) -> None:
    call(async_op=True).wait()


def _time_parts(
    torch: Any, num_bytes: int, group: Any, collectives: Collectives, choices: Choices
) -> list[Row]:
    """Time one reduction with fewer and fewer of the layers around it."""
    tensor = torch.zeros(num_bytes // 4)
    array, options = tensor.numpy(), torch.distributed.AllreduceOptions()
    options.asyncOp = False
    inner, world = group._collectives, open_world(None).comm

    def reduce() -> None:
        with inner.call("bench torch") as call:
            call.all_reduce_in_place(ReduceOp.SUM, [array])

    def agree() -> None:
        with inner.call("bench torch") as call:
            call.agree()

    candidates: dict[str, Callable[[], object]] = {
        "torch.distributed.all_reduce": lambda: torch.distributed.all_reduce(tensor),
        "without torch's function": lambda: group.allreduce([tensor], options),
        "without Work, queue and Tensor": reduce,
        "the agreement alone": agree,
        "mpi4py's Allreduce in place": lambda: world.Allreduce(MPI.IN_PLACE, array),
    }
    timings = take_turns(candidates, collectives, choices.num_samples)
    whole = next(iter(candidates))
    return [
        {
            "num_bytes": num_bytes,
            "part": name,
            "time_s": timings.median_s(name),
            "share": timings.median_ratio(name, whole),
        }
        for name in candidates
    ]


def _time_steps(
    torch: Any, name: str, groups: dict[str, Any], collectives: Collectives, choices: Choices
) -> Row:
    candidates = {
        each: _step(torch, _WIDTHS[name], group)
        for each, group in [*groups.items(), ("alone", None)]
    }
    timings = take_turns(candidates, collectives, choices.num_samples)
    return {
        "parameters": name,
        **timings.medians(),
        **timings.ratio("ratio", _OURS, _GLOO),
        "over_alone": timings.median_ratio(_OURS, "alone"),
    }


def _step(torch: Any, widths: tuple[int, ...], group: Any) -> Callable[[], object]:
    """Return one training step over `group`, or of one rank alone."""
    torch.manual_seed(0)
    layers = [
        each
        for first, second in itertools.pairwise(widths)
        for each in (torch.nn.Linear(first, second), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers[:-1])
    if group is not None:
        ddp = torch.nn.parallel.DistributedDataParallel
        model = ddp(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    examples, target = torch.ones(_BATCH, widths[0]), torch.zeros(_BATCH, widths[-1])

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(examples), target).backward()
        optimizer.step()

    return step


BENCHMARK = Benchmark(
    "torch",
    "torch.distributed over this backend and over gloo",
    measure,
    (
        Table(
            (
                Column.size("tensor", "num_bytes"),
                Column.time("gloo", "gloo_s"),
                Column.time("mpistrat", "mpistrat_s"),
                Column.speed_up("speed-up", "ratio"),
                Column.time("gloo, async", "gloo_async_s"),
                Column.time("mpistrat, async", "mpistrat_async_s"),
                Column.speed_up("speed-up, async", "async_ratio"),
            ),
            title="all_reduce",
        ),
        Table(
            (
                Column.text("parameters", "parameters"),
                Column.time("gloo", "gloo_s"),
                Column.time("mpistrat", "mpistrat_s"),
                Column.speed_up("speed-up", "ratio"),
                Column.time("no DDP", "alone_s"),
                Column.speed_up("over no DDP", "over_alone"),
            ),
            key=_STEPS,
            title="steps of DistributedDataParallel",
        ),
        Table(
            (
                Column.size("tensor", "num_bytes"),
                Column.text("what is timed", "part"),
                Column.time("time", "time_s"),
                Column.ratio("share of all", "share"),
            ),
            key=_PARTS,
            title="all_reduce with fewer and fewer layers",
        ),
    ),
    (
        Bars(
            lambda row: readable_size(row["num_bytes"]),
            {"ratio": "synchronous", "async_ratio": "asynchronous"},
            "time over that of gloo",
            title="all_reduce",
            line_at=1.0,
        ),
        Bars(
            lambda row: str(row["parameters"]),
            {"ratio": "DDP step"},
            "time over that of gloo",
            table=_STEPS,
            title="steps of DistributedDataParallel",
            line_at=1.0,
        ),
    ),
    sizes=(8, 2**16, 2**20, 2**24),
)
