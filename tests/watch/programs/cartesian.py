# kind: unmatched message; odd: [0]; sizes: 3, 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
ring = comm.Create_cart([size], [True])
if ring.rank == 0:
    ring.Recv(np.empty(1), source=ring.Shift(0, 1)[0])  # at: [0]
