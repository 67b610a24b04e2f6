# kind: different collectives; odd: [size - 1]; sizes: 3, 4
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(3)
if rank < size - 1:
    comm.Barrier()  # at: range(size - 1)
    comm.Allreduce(MPI.IN_PLACE, x)
else:
    comm.Allreduce(MPI.IN_PLACE, x)  # at: [size - 1]
    comm.Barrier()
