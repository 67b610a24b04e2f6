# kind: cycle; odd: [0, 1]; sizes: 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank < 2:
    comm.Ssend(np.ones(3), dest=1 - rank)  # at: [0, 1]
    comm.Recv(np.empty(3), source=1 - rank)
comm.Barrier()  # at: [2, 3]
