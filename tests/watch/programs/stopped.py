# kind: stopped; odd: [1]; sizes: 3
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
import os
import signal
import time

comm.Barrier()
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP)  # at: [1]
comm.Barrier()  # at: [0, *range(2, size)]
