# kind: missing ranks; odd: [1]; sizes: 2, 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
window = MPI.Win.Allocate(8, comm=comm)
comm.Barrier()
if rank == 0:
    window.Lock(0)
comm.Barrier()
if rank == 1:
    window.Lock(0)  # at: [1]
    window.Put(np.ones(1), 0)
    window.Flush(0)  # at: [1]
