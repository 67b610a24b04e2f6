# kind: ended; odd: [size - 1]
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(3)
for _ in range(5 if rank < size - 1 else 4):
    comm.Allreduce(MPI.IN_PLACE, x)  # at: range(size - 1)
