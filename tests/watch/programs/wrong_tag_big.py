# kind: unmatched message; odd: []; sizes: 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    comm.Send(np.ones(1000000), dest=1, tag=8)  # at: [0]
else:
    comm.Recv(np.empty(1000000), source=0, tag=7)  # at: [1]
