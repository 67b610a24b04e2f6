"""The same training step by PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import numpy as np

from mpistrat.bench.digits import LAYER_SIZES, LEARNING_RATE, MOMENTUM, Batch, first_weights
from mpistrat.collectives import Collectives
from mpistrat.cores import num_cores
from mpistrat.errors import MpistratError
from mpistrat.tensors import import_torch

__all__ = ["DdpLoop", "open_ddp_loop"]

_TIMEOUT = datetime.timedelta(seconds=60)


class DdpLoop:
    """A training loop on the process group that `open_ddp_loop` has made.

    The size of the global batch is taken as known, and the gradients travel as DDP packs them,
    beside the backward pass.

    Parameters
    ----------
    torch : module
    batch : Batch
    """

    def __init__(self, torch: Any, batch: Batch) -> None:
        self._torch = torch
        self._image, self._label = torch.from_numpy(batch.image), torch.from_numpy(batch.label)
        # DDP takes the mean over ranks of the gradients.
        self._scale = torch.distributed.get_world_size() / batch.global_size
        self._layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(LAYER_SIZES)]
        with torch.no_grad():
            for parameter, weight in zip(self._parameters(), first_weights(), strict=True):
                parameter.copy_(torch.from_numpy(weight.T))
        tanh = [torch.nn.Tanh() for _ in self._layers]
        modules = [each for pair in zip(self._layers, tanh, strict=True) for each in pair][:-1]
        self._model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*modules))
        self._optimizer = torch.optim.SGD(self._model.parameters(), LEARNING_RATE, MOMENTUM)
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
        """Return kernel and bias of each layer in turn. Local."""
        return [parameter.detach().numpy().T for parameter in self._parameters()]

    def close(self) -> None:
        """Leave the process group. **Collective**."""
        self._torch.distributed.destroy_process_group()

    def _parameters(self) -> list[Any]:
        return [each for layer in self._layers for each in (layer.weight, layer.bias)]


def open_ddp_loop(
    collectives: Collectives, host: str, ranks_per_node: int, batch: Batch
) -> DdpLoop | str:
    """Make the process group and the loop, or return why there is none. **Collective**.

    Parameters
    ----------
    collectives : Collectives
    host : str
        Where the other ranks reach rank 0.
    ranks_per_node : int
        They share the cores for PyTorch's threads.
    batch : Batch
    """
    torch = import_torch()
    if not all(collectives.gather_json(torch is not None)):
        return "PyTorch is not installed on every rank, so DistributedDataParallel is left out."
    if not all(collectives.gather_json(bool(torch.distributed.is_available()))):
        return "This PyTorch has no torch.distributed, so DistributedDataParallel is left out."
    torch.set_num_threads(max(1, num_cores() // ranks_per_node))
    try:
        _open_group(torch, collectives, host)
        with collectives.together("bench step"):
            return DdpLoop(torch, batch)
    except (RuntimeError, OSError, MpistratError) as error:
        return f"DistributedDataParallel over gloo is left out: {str(error).splitlines()[0]}"


def _open_group(torch: Any, collectives: Collectives, host: str) -> None:
    """Join all ranks in a process group of gloo. **Collective**."""
    rank, size = collectives.rank, collectives.size
    make_store = torch.distributed.TCPStore
    store = None
    with collectives.together("bench step"):
        if rank == 0:  # the system chooses a free port
            store = make_store(host, 0, size, True, _TIMEOUT, wait_for_workers=False)
    port = collectives.broadcast_json(store.port if store is not None else None)
    with collectives.together("bench step"):
        if store is None:
            store = make_store(host, port, size, False, _TIMEOUT)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )
