# kind: died; odd: [1]; sizes: 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
import os
import signal
import time

time.sleep(1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
