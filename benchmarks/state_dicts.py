"""Benchmark of saving PyTorch's state dicts: one HDF5 file, the files of DCP, and Orbax."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import context
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
from mpistrat.bench.checkpointing import new_folder
from mpistrat.bench.measure import SHAPES, random_arrays, take_turns
from mpistrat.pytorch import import_torch
from mpistrat.strategies import MPIStrategy

_OURS, _DCP, _ORBAX = "mpistrat", "dcp", "orbax"
_MODELS = {"161 tensors": SHAPES, "10 tensors": ((2_500_000,),) * 10}
"""Shapes of 102 MB and of 100 MB."""


def measure(choices: Choices) -> Findings:
    """Time saves and loads of the same tensors in turns. **Collective** over COMM_WORLD."""
    collectives = context.collectives_of(MPIStrategy(device="cpu"))
    torch = import_torch()
    if not all(collectives.gather_json(torch is not None)):
        return Findings({RESULTS: []}, ("PyTorch is not installed on every rank.",))
    from mpistrat.torch import init

    init()
    rows: list[Row] = []
    # DCP warns of each group that is not one of its own backends.
    with new_folder(collectives) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model, shapes in _MODELS.items():
            for is_sharded in (False, True):
                state = _state(torch, random_arrays(shapes), is_sharded)
                saves, loads = _calls(state, folder)
                if collectives.size == 1 and not is_sharded:
                    more = _orbax_calls(state, folder)
                    saves, loads = saves | more[0], loads | more[1]
                how = "sharded" if is_sharded else "equal on all ranks"
                for what, calls in (("save", saves), ("load", loads)):
                    timings = take_turns(calls, collectives, choices.num_samples)
                    row: dict[str, Any] = {"what": what, "state": f"{model}, {how}"}
                    row |= timings.medians()
                    for peer in calls.keys() - {_OURS}:
                        row |= timings.ratio(f"over_{peer}", _OURS, peer)
                    rows.append(row)
    torch.distributed.destroy_process_group()
    missing = "" if _has_orbax() else "Orbax is not installed, so it is left out."
    return Findings({RESULTS: rows}, (missing,) if missing else ())


def _state(torch: Any, arrays: list[np.ndarray], is_sharded: bool) -> dict[str, Any]:
    tensors = {f"weight{i}": torch.from_numpy(array) for i, array in enumerate(arrays)}
    if not is_sharded:
        return tensors
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}


_Calls = dict[str, Callable[[], object]]


def _calls(state: Mapping[str, Any], folder: Path) -> tuple[_Calls, _Calls]:
    """Return the saves and the loads by both storages. All ranks call them."""
    import torch.distributed.checkpoint as dcp

    from mpistrat.torch import HDF5Reader, HDF5Writer

    file, files = folder / "state.h5", folder / "state"
    saves: _Calls = {
        _OURS: lambda: dcp.save(dict(state), storage_writer=HDF5Writer(file)),
        _DCP: lambda: dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(files)),
    }
    loads: _Calls = {
        _OURS: lambda: dcp.load(dict(state), storage_reader=HDF5Reader(file)),
        _DCP: lambda: dcp.load(dict(state), storage_reader=dcp.FileSystemReader(files)),
    }
    return saves, loads


def _has_orbax() -> bool:
    return importlib.util.find_spec("orbax") is not None


def _orbax_calls(state: Mapping[str, Any], folder: Path) -> tuple[_Calls, _Calls]:
    """Return a save and a load of the same arrays by Orbax, whose ranks are those of JAX."""
    if not _has_orbax():
        return {}, {}
    checkpointer = importlib.import_module("orbax.checkpoint").PyTreeCheckpointer()
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    path = (folder / "orbax").resolve()

    def save() -> None:
        shutil.rmtree(path, ignore_errors=True)
        checkpointer.save(path, arrays)

    return {_ORBAX: save}, {_ORBAX: partial(checkpointer.restore, path)}


BENCHMARK = Benchmark(
    "dcp",
    "state dicts in one HDF5 file, compared with the files of torch.distributed.checkpoint",
    measure,
    (
        Table(
            (
                Column.text("what", "what"),
                Column.text("state", "state"),
                Column.time("mpistrat", "mpistrat_s"),
                Column.time("DCP", "dcp_s"),
                Column.speed_up("speed-up", "over_dcp"),
                Column.time("Orbax", "orbax_s"),
                Column.speed_up("over Orbax", "over_orbax"),
            )
        ),
    ),
    (
        Bars(
            lambda row: f"{row['what']}\n{row['state']}",
            {"mpistrat_s": "mpistrat", "dcp_s": "DCP"},
            "seconds",
        ),
    ),
)
