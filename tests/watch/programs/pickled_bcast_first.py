# kind: missing ranks; odd: [1]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 1:
    comm.bcast(None, root=0)  # at: [1]
