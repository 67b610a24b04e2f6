# kind: different collectives; odd: []; sizes: 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.ones(3)
if rank == 0:
    comm.Barrier()  # at: [0]
    comm.Allreduce(MPI.IN_PLACE, x)
else:
    comm.Allreduce(MPI.IN_PLACE, x)  # at: [1]
    comm.Barrier()
