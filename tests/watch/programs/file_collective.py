# kind: ended; odd: [size - 1]; sizes: 3, 4
import os
import tempfile

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

path = comm.bcast(os.path.join(tempfile.mkdtemp(), "f") if rank == 0 else None)
file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)
if rank < size - 1:
    file.Write_all(np.ones(3))  # at: range(size - 1)
