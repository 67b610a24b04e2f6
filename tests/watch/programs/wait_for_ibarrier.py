# kind: ended; odd: [size - 1]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank < size - 1:
    comm.Ibarrier().Wait()  # at: range(size - 1)
