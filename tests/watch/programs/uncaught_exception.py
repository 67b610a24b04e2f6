# kind: ended; odd: [1]; sizes: 2, 3
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 1:
    raise KeyError("missing")
comm.Barrier()  # at: [0, *range(2, size)]
