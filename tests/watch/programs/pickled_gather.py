# kind: ended; odd: [size - 1]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
comm.bcast("x")
if rank < size - 1:
    comm.gather(rank)  # at: [0]
