# kind: missing ranks; odd: [0]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    comm.Split(0)  # at: [0]
