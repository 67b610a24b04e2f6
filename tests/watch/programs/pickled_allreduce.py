# kind: ended; odd: [size - 1]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
comm.allreduce(rank)
if rank < size - 1:
    comm.allreduce({"a": 1}, op=lambda a, b: a)  # at: range(size - 1)
