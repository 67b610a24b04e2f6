# kind: different collectives, missing ranks, ended; odd: [0]; sizes: 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
local = comm.Split(rank % 2)
inter = local.Create_intercomm(0, comm, 1 - rank % 2, 5)
if rank == 0:
    inter.Barrier()  # at: [0]
