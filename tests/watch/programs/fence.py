# kind: ended; odd: [size - 1]; sizes: 3, 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
window = MPI.Win.Create(np.zeros(4), comm=comm)
window.Fence()
if rank < size - 1:
    window.Fence()  # at: range(size - 1)
