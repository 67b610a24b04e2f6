# kind: different lengths; odd: [size - 1]; sizes: 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(1000000 if rank < size - 1 else 10)
try:
    comm.Bcast(x, root=0)
except MPI.Exception:
    pass
comm.Barrier()
