# kind: unmatched message; odd: [0]
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    comm.Recv(np.empty(3), source=MPI.ANY_SOURCE)  # at: [0]
