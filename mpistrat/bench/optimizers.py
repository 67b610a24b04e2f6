"""Benchmark of optimizer steps beside ``torch.optim`` on the same arrays."""

from __future__ import annotations

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
from mpistrat.bench.measure import take_turns
from mpistrat.bench.networks import NUM_PARAMETERS, SHAPES, random_arrays
from mpistrat.optimizers import SGD, Adam, Optimizer
from mpistrat.pytorch import import_torch
from mpistrat.strategies import MPIStrategy, OneDeviceStrategy
from mpistrat.variables import Variable

__all__ = ["BENCHMARK"]

_RULES: dict[str, tuple[Callable[[], Optimizer], str, dict[str, Any]]] = {
    "SGD": (lambda: SGD(0.01), "SGD", {"lr": 0.01}),
    "SGD, momentum": (lambda: SGD(0.01, 0.9), "SGD", {"lr": 0.01, "momentum": 0.9}),
    "Adam": (lambda: Adam(1e-4), "Adam", {"lr": 1e-4}),
    "AdamW": (lambda: Adam(1e-4, weight_decay=0.1), "AdamW", {"lr": 1e-4, "weight_decay": 0.1}),
}
_LAYOUTS = {"one array": ((NUM_PARAMETERS,),), f"ResNet-50, {len(SHAPES)} arrays": SHAPES}


def measure(choices: Choices) -> Findings:
    """Time one step of each optimizer on 25.6 million float32 parameters. **Collective**."""
    torch = import_torch()
    collectives = MPIStrategy(device="cpu").extended._collectives
    rows: list[Row] = []
    for layout, shapes in _LAYOUTS.items():
        gradients = random_arrays(shapes)
        for rule, (make, torch_name, options) in _RULES.items():
            candidates = {"ours": _our_step(make(), gradients)}
            if torch is not None:
                kind = getattr(torch.optim, torch_name)
                for mode in ("fused", "foreach"):
                    candidates[mode] = _torch_step(torch, kind, {**options, mode: True}, gradients)
            candidates["copy"] = _copy_of(gradients)
            timings = take_turns(candidates, collectives, choices.num_samples)
            row = {"optimizer": rule, "layout": layout, "num_parameters": NUM_PARAMETERS}
            row |= timings.medians()
            row |= {
                f"ours_over_{peer}": timings.median_ratio("ours", peer)
                for peer in candidates
                if peer != "ours"
            }
            rows.append(row)
    missing = () if torch is not None else ("PyTorch is not installed, so it is left out.",)
    return Findings({RESULTS: rows}, missing)


def _our_step(optimizer: Optimizer, gradients: list[np.ndarray]) -> Callable[[], object]:
    """Return a step on reduced gradients, in cross-replica context."""
    strategy = OneDeviceStrategy("cpu")
    with strategy.scope():
        variables = [Variable(np.zeros_like(g), name=str(i)) for i, g in enumerate(gradients)]
    pairs = list(zip(gradients, variables, strict=True))
    return lambda: optimizer.apply_gradients(pairs)


def _torch_step(
    torch: Any, kind: Any, options: dict[str, Any], gradients: list[np.ndarray]
) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.zeros(g.shape)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient)
    step: Callable[[], object] = kind(parameters, **options).step
    return step


def _copy_of(arrays: list[np.ndarray]) -> Callable[[], object]:
    copies = [np.empty_like(array) for array in arrays]

    def copy() -> None:
        for target, source in zip(copies, arrays, strict=True):
            np.copyto(target, source)

    return copy


BENCHMARK = Benchmark(
    "optimizers",
    "one step on 25.6 million float32 parameters, beside torch.optim where it is installed",
    measure,
    (
        Table(
            (
                Column.text("optimizer", "optimizer"),
                Column.text("parameters", "layout"),
                Column.time("mpistrat", "ours_s"),
                Column.time("torch fused", "fused_s"),
                Column.time("torch foreach", "foreach_s"),
                Column.ratio("ours / fused", "ours_over_fused"),
                Column.ratio("ours / foreach", "ours_over_foreach"),
                Column.time("one copy", "copy_s"),
            )
        ),
    ),
    (
        Bars(
            lambda row: f"{row['optimizer']}\n{row['layout']}",
            {
                "ours_s": "mpistrat",
                "fused_s": "torch fused",
                "foreach_s": "torch foreach",
                "copy_s": "one copy",
            },
            "seconds",
        ),
    ),
)
