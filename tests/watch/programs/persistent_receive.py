# kind: unmatched message; odd: [0]
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    request = comm.Recv_init(np.empty(3), source=1, tag=4)
    request.Start()
    request.Wait()  # at: [0]
