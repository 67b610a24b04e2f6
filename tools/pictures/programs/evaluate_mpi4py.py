"""Evaluate a model with mpi4py, with one mistake."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
losses = np.full(4, 1.0 + comm.rank)
total = np.empty_like(losses)
every = np.empty((comm.size, 4))

if comm.rank == 0:  # the mistake: the other ranks do not call it
    comm.Allreduce(losses, total)
    print("loss:", total.mean() / comm.size)
comm.Allgather(losses, every)
