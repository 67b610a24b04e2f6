# kind: missing ranks; odd: [0]; sizes: 2, 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
window = MPI.Win.Create(np.zeros(4), comm=comm)
group = comm.group.Incl([1 - rank]) if rank < 2 else None
if rank == 0:
    window.Start(group)  # at: [0]
    window.Put(np.ones(1), 1)
    window.Complete()  # at: [0]
