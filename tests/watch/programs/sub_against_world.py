# kind: different collectives; odd: [1]; sizes: 3
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
half = comm.Split(0 if rank < 2 else 1)
if rank == 0:
    comm.Barrier()  # at: [0]
elif rank == 1:
    half.Barrier()  # at: [1]
else:
    comm.Barrier()  # at: [2]
