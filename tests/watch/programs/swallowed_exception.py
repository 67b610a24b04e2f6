# kind: ended; odd: [1]; sizes: 3, 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(1)
try:
    if rank == 1:
        raise KeyError("missing")
    comm.Allreduce(MPI.IN_PLACE, x)  # at: [0, *range(2, size)]
except KeyError:
    pass
