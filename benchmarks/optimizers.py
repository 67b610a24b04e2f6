"""Benchmark of optimizer steps beside ``torch.optim`` on the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpistrat.arrays import Device
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
from mpistrat.bench.measure import NUM_PARAMETERS, SHAPES, random_arrays, take_turns
from mpistrat.optimizers import SGD, Adam, Optimizer
from mpistrat.pytorch import import_torch
from mpistrat.strategies import MPIStrategy, OneDeviceStrategy
from mpistrat.variables import Variable

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
    strategy = MPIStrategy(device=choices.device)
    xp, collectives = strategy.extended.xp, strategy.extended._collectives
    device = collectives.device
    if torch is not None and device.kind == "gpu" and not torch.cuda.is_available():
        torch = None
    rows: list[Row] = []
    for layout, shapes in _LAYOUTS.items():
        gradients = [xp.asarray(gradient) for gradient in random_arrays(shapes)]
        for rule, (make, torch_name, options) in _RULES.items():
            candidates = {"ours": _our_step(make, gradients, device)}
            if torch is not None:
                kind = getattr(torch.optim, torch_name)
                for mode in ("fused", "foreach"):
                    candidates[mode] = _torch_step(torch, kind, {**options, mode: True}, gradients)
            candidates["copy"] = _copy_of(xp, gradients)
            timings = take_turns(candidates, collectives, choices.num_samples)
            row = {"optimizer": rule, "layout": layout, "num_parameters": NUM_PARAMETERS}
            row |= timings.medians()
            row |= {
                f"ours_over_{peer}": timings.median_ratio("ours", peer)
                for peer in candidates
                if peer != "ours"
            }
            rows.append(row)
    missing = () if torch is not None else (f"There is no PyTorch for {device}: it is left out.",)
    return Findings({RESULTS: rows}, missing)


def _our_step(
    make: Callable[[], Optimizer], gradients: list[Any], device: Device
) -> Callable[[], object]:
    """Return a step of one replica on `device`."""
    strategy = OneDeviceStrategy(str(device))
    with strategy.scope():
        optimizer = make()
        variables = [Variable(g * 0, name=str(i)) for i, g in enumerate(gradients)]
    step = partial(optimizer.apply_gradients, list(zip(gradients, variables, strict=True)))
    # A loop on a device steps inside of run; on the host it makes no difference.
    return step if device.kind == "cpu" else lambda: strategy.run(step)


def _torch_step(
    torch: Any, kind: Any, options: dict[str, Any], gradients: list[Any]
) -> Callable[[], object]:
    tensors = [torch.from_dlpack(gradient) for gradient in gradients]
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor
    step: Callable[[], object] = kind(parameters, **options).step
    return step


def _copy_of(xp: Any, arrays: list[Any]) -> Callable[[], object]:
    copies = [xp.empty_like(array) for array in arrays]

    def copy() -> None:
        for target, source in zip(copies, arrays, strict=True):
            xp.copyto(target, source)

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
                Column.speed_up("speed-up over fused", "ours_over_fused"),
                Column.speed_up("over foreach", "ours_over_foreach"),
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
    runs_on_devices=True,
)
