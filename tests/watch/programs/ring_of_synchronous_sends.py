# kind: cycle; odd: []
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.empty(1)
comm.Ssend(x, dest=(rank + 1) % size)  # at: range(size)
comm.Recv(x, source=(rank - 1) % size)
