# kind: missing ranks; odd: [1]; sizes: 3, 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
for _ in range(4 if rank == 1 else 3):
    comm.Barrier()  # at: [1]
