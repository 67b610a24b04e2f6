# kind: stopped; odd: [1]; sizes: 3
import os
import signal
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

comm.Barrier()
if rank == 1:
    time.sleep(1)  # at: [1]
    os.kill(os.getpid(), signal.SIGSTOP)  # at: [1]
comm.Barrier()  # at: [0, *range(2, size)]
