# kind: unmatched message; odd: [1]; sizes: 2, 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    comm.Send(np.ones(3), dest=1, tag=8)
if rank == 1:
    comm.Recv(np.empty(3), source=0, tag=7)  # at: [1]
