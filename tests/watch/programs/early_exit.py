# kind: ended; odd: [1]; sizes: 3, 4
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

if rank == 1:
    sys.exit(3)
comm.Allreduce(MPI.IN_PLACE, np.ones(1))  # at: [0, *range(2, size)]
