"""Start of a Keras program: the ranks of MPI become the processes of Keras."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import keras
import torch.distributed as dist
from keras.src.backend.torch.ops import core

import mpistrat.torch as mst

if TYPE_CHECKING:
    from mpi4py import MPI


def init(
    timeout: float | timedelta | None = None, comm: MPI.Intracomm | None = None
) -> dist.ProcessGroup:
    """Start torch.distributed over MPI, and let Keras train in parallel on its ranks.

    **Collective** over `comm`. Call it before the model is built. It does the same as
    `mpistrat.torch.init`, followed by
    ``keras.distribution.set_distribution(DataParallel(auto_shard_dataset=False))``, unless the
    program has set a distribution already. From then on ``model.fit`` averages gradients over the
    ranks and sums metrics over them; each rank passes its own rows, which `HDF5Dataset` selects.

    Parameters
    ----------
    timeout : float or timedelta, optional
        How long an operation waits for the other ranks; a number is in seconds. Default:
        ``MPISTRAT_TIMEOUT_S``.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the job. Default: COMM_WORLD.

    Returns
    -------
    torch.distributed.ProcessGroup
        The world group.

    Raises
    ------
    LaunchError
        If the backend of Keras is not PyTorch, or if the ranks were not started by MPI's launcher,
        as under torchrun.
    NotImplementedError
        If Keras is older than 3.16, or uses a GPU.
    ValueError
        If the process has a world group already, or `timeout` is not above 0.

    Examples
    --------
    >>> group = mk.init()
    >>> keras.distribution.distribution().auto_shard_dataset
    False
    """
    device = str(core.get_device())
    if not device.startswith("cpu"):
        raise NotImplementedError(
            f"Keras would train on {device!r}, but mpistrat.keras trains on CPUs only. Set the "
            "environment variable KERAS_TORCH_DEVICE=cpu, or start Keras over NCCL, by "
            "keras.distribution.initialize()."
        )
    group = mst.init(timeout=timeout, comm=comm)
    if keras.distribution.distribution() is None:
        # The ranks pass their own rows, so Keras must not divide these again.
        parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(parallel)
    return group
