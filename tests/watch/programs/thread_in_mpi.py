# kind: ended; odd: [1]; sizes: 3
import threading

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size

own = comm.Dup()
thread = threading.Thread(target=own.Barrier) if rank != 1 else None
if rank != 1:
    thread.start()
    comm.Barrier()  # at: [0, 2]
