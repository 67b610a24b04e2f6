# kind: busy; odd: [1]
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

if rank == 1:
    time.sleep(600)  # at: [1]
comm.Barrier()  # at: [0, *range(2, size)]
