# kind: unmatched message, cycle; odd: []; sizes: 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(1)
other = 1 - rank
comm.Sendrecv(x, other, 1, x.copy(), other, 2)  # at: [0, 1]
