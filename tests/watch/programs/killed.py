# kind: died; odd: [1]; sizes: 3
import os
import signal
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

time.sleep(1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
