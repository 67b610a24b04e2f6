# kind: unmatched message; odd: [0]
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    requests = [comm.Irecv(np.empty(3), source=i, tag=4) for i in range(1, size)]
    MPI.Request.Waitall(requests)  # at: [0]
elif rank > 1:
    comm.Send(np.ones(3), dest=0, tag=4)
