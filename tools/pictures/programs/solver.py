"""A solver with plain mpi4py whose last rank stops one step too early."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
field = np.full(100, comm.rank, float)


def residual() -> float:
    """Return the norm over all ranks."""
    return float(comm.allreduce(float(field @ field)))


step = 0
while residual() > 1e-3:
    field *= 0.5
    step += 1
    if not np.any(field > 0.02) and comm.rank == comm.size - 1:
        break
print("steps", step)
