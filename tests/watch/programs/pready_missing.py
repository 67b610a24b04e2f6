# kind: unmatched message; odd: [1]
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.rank
values = np.zeros(4)
if rank == 0:
    request = comm.Psend_init(values, 4, dest=1)
    request.Start()
    request.Pready_range(0, 2)
elif rank == 1:
    request = comm.Precv_init(values, 4, 0, 0)
    request.Start()
    request.Wait()  # at: [1]
