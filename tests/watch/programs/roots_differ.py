# kind: different roots; odd: [size - 1]; sizes: 3, 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(100000)
comm.Reduce(x.copy(), x, root=0 if rank < size - 1 else size - 1)
comm.Barrier()
comm.Bcast(x, root=0 if rank < size - 1 else size - 1)
comm.Barrier()
