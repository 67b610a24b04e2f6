# kind: cycle; odd: []; sizes: 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
comm.Send(np.ones(1000000), dest=1 - rank)  # at: [0, 1]
comm.Recv(np.empty(1000000), source=1 - rank)
