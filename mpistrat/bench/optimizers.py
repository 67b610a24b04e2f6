"""Steps of the optimizers, beside those of ``torch.optim`` on the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.bench.benchmark import Benchmark, Choices, Column, Row, ratio, time
from mpistrat.bench.resnet50 import NUM_PARAMETERS, SHAPES
from mpistrat.bench.timing import median_times_s
from mpistrat.optimizers import SGD, Adam, Optimizer
from mpistrat.strategies import MPIStrategy, OneDeviceStrategy
from mpistrat.tensors import import_torch
from mpistrat.variables import Variable

__all__ = ["BENCHMARK"]

_RULES: dict[str, tuple[Callable[[], Optimizer], str, dict[str, Any]]] = {
    "SGD": (lambda: SGD(0.01), "SGD", {"lr": 0.01}),
    "SGD, momentum": (lambda: SGD(0.01, 0.9), "SGD", {"lr": 0.01, "momentum": 0.9}),
    "Adam": (lambda: Adam(1e-4), "Adam", {"lr": 1e-4}),
    "AdamW": (lambda: Adam(1e-4, weight_decay=0.1), "AdamW", {"lr": 1e-4, "weight_decay": 0.1}),
}
_LAYOUTS = {"one array": ((NUM_PARAMETERS,),), f"ResNet-50, {len(SHAPES)} arrays": SHAPES}


def measure(choices: Choices) -> list[Row]:
    """Time one step of each optimizer on 25.6 million float32 parameters. **Collective**."""
    torch = import_torch()
    collectives = MPIStrategy(device="cpu").extended.collectives
    rows: list[Row] = []
    for layout, shapes in _LAYOUTS.items():
        gradients = _gradients(shapes)
        for rule, (make, torch_name, options) in _RULES.items():
            candidates = {"ours": _our_step(make(), gradients)}
            if torch is not None:
                kind = getattr(torch.optim, torch_name)
                for mode in ("fused", "foreach"):
                    candidates[mode] = _torch_step(torch, kind, {**options, mode: True}, gradients)
            candidates["copy"] = _copy_of(gradients)
            medians = median_times_s(candidates, collectives, choices.num_samples)
            row = {"optimizer": rule, "layout": layout, "num_parameters": NUM_PARAMETERS}
            row |= {f"{name}_s": seconds for name, seconds in medians.items()}
            row |= {
                f"ours_over_{peer}": medians["ours"] / medians[peer]
                for peer in candidates
                if peer != "ours"
            }
            rows.append(row)
    return rows


def _gradients(shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) * np.float32(1e-3) for shape in shapes]


def _our_step(optimizer: Optimizer, gradients: list[np.ndarray]) -> Callable[[], object]:
    """Return a step in cross-replica context: the gradients are there, nothing is reduced."""
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
        Column("optimizer", lambda row: str(row["optimizer"])),
        Column("parameters", lambda row: str(row["layout"])),
        time("mpistrat", "ours_s"),
        time("torch fused", "fused_s"),
        time("torch foreach", "foreach_s"),
        ratio("ours / fused", "ours_over_fused"),
        ratio("ours / foreach", "ours_over_foreach"),
        time("one copy", "copy_s"),
    ),
)
