"""Benchmark of one training step, compared with raw MPI and PyTorch DDP."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.small_network import (
    LAYER_SIZES,
    Batch,
    backward,
    cross_entropy,
    first_weights,
    forward,
    random_batch,
)
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
from mpistrat.bench.measure import Timings, take_turns
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import MpistratError
from mpistrat.metrics import Accuracy, Mean
from mpistrat.mpi.world import World, open_world
from mpistrat.optimizers import SGD
from mpistrat.options import ReduceOp
from mpistrat.pytorch import import_torch
from mpistrat.replica import ReplicaContext
from mpistrat.sharding import ceil_div
from mpistrat.strategies import MPIStrategy, Strategy, get_replica_context
from mpistrat.system.cpu import num_cores
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpi4py import MPI

_LEARNING_RATE = 0.05
_MOMENTUM = 0.9


class _Loop(Protocol):
    """A training loop whose steps all learn from the same batch."""

    def step(self) -> None:
        """Make one step. **Collective**."""

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn, equal on all ranks."""


class PackageLoop:
    """The loop of ``jobs/train_digits.py``: strategy, variables, optimizer and metrics."""

    def __init__(self, strategy: Strategy, batch: Batch) -> None:
        self._strategy, self._batch = strategy, batch
        with strategy.scope():
            self._variables = [
                Variable(weight, name=f"weight{i}") for i, weight in enumerate(first_weights())
            ]
            self._optimizer = SGD(_LEARNING_RATE, momentum=_MOMENTUM)
            self._loss, self._accuracy = Mean(name="loss"), Accuracy(name="accuracy")

    def step(self) -> None:
        """Make one step. **Collective**."""
        self._strategy.run(self._train, args=(self._batch.image, self._batch.label))

    def _train(self, image: np.ndarray, label: np.ndarray) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        weights = self.weights()
        logits, tape = forward(weights, image)
        losses, error = cross_entropy(logits, label)
        global_batch_size = int(replica.all_reduce(ReduceOp.SUM, len(label)))
        gradients = backward(weights, tape, error / global_batch_size)
        self._optimizer.apply_gradients(zip(gradients, self._variables, strict=True))
        self._loss.update_state(losses)
        self._accuracy.update_state(label, logits.argmax(axis=1))

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn."""
        return [variable.value() for variable in self._variables]


class HandwrittenLoop:
    """The same on mpi4py and NumPy without checks: an ``Allreduce`` for each array, or packed."""

    def __init__(self, comm: MPI.Intracomm, batch: Batch, is_packed: bool = False) -> None:
        from mpi4py import MPI  # importing it starts MPI

        self._comm, self._batch = comm, batch
        self._in_place = MPI.IN_PLACE
        self._weights = first_weights()
        self._velocities = [np.zeros_like(weight) for weight in self._weights]
        stops = np.cumsum([weight.size for weight in self._weights])
        self._packed = np.empty(int(stops[-1]) if is_packed else 0, np.float32)
        self._parts = np.split(self._packed, stops[:-1])
        self._global_batch_size = np.zeros(1, np.int64)
        self.loss_sum, self.num_examples, self.num_correct = 0.0, 0, 0

    def step(self) -> None:
        """Make one step. **Collective**."""
        label = self._batch.label
        logits, tape = forward(self._weights, self._batch.image)
        losses, error = cross_entropy(logits, label)
        self._comm.Allreduce(np.array([len(label)]), self._global_batch_size)
        gradients = backward(self._weights, tape, error / np.float32(self._global_batch_size[0]))
        totals = self._reduced(gradients)
        for weight, velocity, total in zip(self._weights, self._velocities, totals, strict=True):
            velocity *= _MOMENTUM
            total *= _LEARNING_RATE
            velocity += total
            weight -= velocity
        self.loss_sum += float(losses.sum())
        self.num_examples += len(label)
        self.num_correct += int((logits.argmax(axis=1) == label).sum())

    def _reduced(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        """Return the sums over ranks. **Collective**."""
        if not self._packed.size:
            for gradient in gradients:
                self._comm.Allreduce(self._in_place, gradient)
            return gradients
        for gradient, part in zip(gradients, self._parts, strict=True):
            part[...] = gradient.reshape(-1)
        self._comm.Allreduce(self._in_place, self._packed)
        return [
            part.reshape(gradient.shape)
            for part, gradient in zip(self._parts, gradients, strict=True)
        ]

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn."""
        return self._weights


_TIMEOUT = datetime.timedelta(seconds=60)


class DdpLoop:
    """The same by PyTorch's DDP, on the process group that `open_ddp_loop` has made."""

    def __init__(self, torch: Any, batch: Batch) -> None:
        self._torch = torch
        self._image, self._label = torch.from_numpy(batch.image), torch.from_numpy(batch.label)
        # DDP averages gradients over ranks. It is given the size of the global batch, so that it
        # needs no further reduction, unlike the other loops.
        self._scale = torch.distributed.get_world_size() / batch.global_size
        self._layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(LAYER_SIZES)]
        with torch.no_grad():
            for parameter, weight in zip(self._parameters(), first_weights(), strict=True):
                parameter.copy_(torch.from_numpy(weight.T))
        tanh = [torch.nn.Tanh() for _ in self._layers]
        modules = [each for pair in zip(self._layers, tanh, strict=True) for each in pair][:-1]
        self._model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*modules))
        self._optimizer = torch.optim.SGD(self._model.parameters(), _LEARNING_RATE, _MOMENTUM)
        self._loss = torch.nn.CrossEntropyLoss(reduction="none")
        self.loss_sum, self.num_examples, self.num_correct = 0.0, 0, 0

    def step(self) -> None:
        """Make one step. **Collective**."""
        logits = self._model(self._image.to(self._torch.float32) / 16)
        losses = self._loss(logits, self._label)
        self._optimizer.zero_grad()
        (losses.sum() * self._scale).backward()
        self._optimizer.step()
        self.loss_sum += float(losses.detach().sum())
        self.num_examples += len(self._label)
        self.num_correct += int((logits.argmax(dim=1) == self._label).sum())

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn."""
        return [parameter.detach().numpy().T for parameter in self._parameters()]

    def close(self) -> None:
        """Leave the process group; this can make no further step. **Collective**."""
        # The group must be idle, and its last owner be torch: where the model drops it, gloo joins
        # its threads while Python's lock is held, and these may wait for that lock.
        del self._model
        self._torch.distributed.barrier()
        self._torch.distributed.destroy_process_group()

    def _parameters(self) -> list[Any]:
        return [each for layer in self._layers for each in (layer.weight, layer.bias)]


def open_ddp_loop(
    collectives: Collectives, host: str, ranks_per_node: int, batch: Batch
) -> DdpLoop | str:
    """Make the process group and the loop, or return why there is none. **Collective**."""
    torch = import_torch()
    if not all(collectives.gather_json(torch is not None)):
        return "PyTorch is not installed on every rank, so DistributedDataParallel is left out."
    if not all(collectives.gather_json(bool(torch.distributed.is_available()))):
        return "This PyTorch has no torch.distributed, so DistributedDataParallel is left out."
    # The ranks of a node share its cores.
    torch.set_num_threads(max(1, num_cores() // ranks_per_node))
    try:
        _open_group(torch, collectives, host)
        with collectives.all_or_none("bench step"):
            return DdpLoop(torch, batch)
    except (RuntimeError, OSError, MpistratError) as error:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return f"DistributedDataParallel over gloo is left out: {str(error).splitlines()[0]}"


def _open_group(torch: Any, collectives: Collectives, host: str) -> None:
    """Join all ranks in a process group of gloo. **Collective**."""
    rank, size = collectives.rank, collectives.size
    make_store = torch.distributed.TCPStore
    store = None
    with collectives.all_or_none("bench step"):
        if rank == 0:  # the system chooses a free port
            store = make_store(host, 0, size, True, _TIMEOUT, wait_for_workers=False)
    port = collectives.broadcast_json(store.port if store is not None else None)
    with collectives.all_or_none("bench step"):
        if store is None:
            store = make_store(host, port, size, False, _TIMEOUT)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )


_LABELS = {
    "ours": "mpistrat",
    "hand": "by hand: mpi4py and NumPy",
    "packed": "by hand: packed",
    "ddp": "PyTorch DDP over gloo",
    "run": "strategy.run of an empty function",
}


def measure(choices: Choices) -> Findings:
    """Time training steps of the digits network, data aside. **Collective** over COMM_WORLD."""
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended._collectives
    world = open_world(None)
    batch = random_batch(world.rank, world.size)
    loops: dict[str, _Loop] = {
        "ours": PackageLoop(strategy, batch),
        "hand": HandwrittenLoop(world.comm, batch),
        "packed": HandwrittenLoop(world.comm, batch, is_packed=True),
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
    row = {"name": name, "loop": _LABELS[name]} | timings.time("step_s", name)
    if name == "run":
        return row
    return row | {
        "over_hand": timings.median_ratio(name, "hand"),
        "over_packed": timings.median_ratio(name, "packed"),
        "over_ours": timings.median_ratio(name, "ours"),
    }


BENCHMARK = Benchmark(
    "step",
    "one training step of a small network, beside a loop by hand and PyTorch DDP",
    measure,
    (
        Table(
            (
                Column.text("loop", "loop"),
                Column.time("a step", "step_s"),
                Column.speed_up("speed-up over by hand", "over_hand"),
                Column.speed_up("over packed", "over_packed"),
                Column.speed_up("over mpistrat", "over_ours"),
            )
        ),
    ),
    (Bars(lambda row: str(row["loop"]).replace(": ", ":\n"), {"step_s": "a step"}, "seconds"),),
)
