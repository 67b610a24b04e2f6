# kind: ended; odd: [size - 1]
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank < size - 1:
    comm.Barrier()  # at: range(size - 1)
