# kind: unmatched message, cycle; odd: []; sizes: 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(1)
comm.Sendrecv(
    x, dest=1 - rank, sendtag=1, recvbuf=x.copy(), source=1 - rank, recvtag=2
)  # at: [0, 1]
