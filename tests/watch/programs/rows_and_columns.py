# kind: different collectives; odd: []; sizes: 4
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
row, column = comm.Split(rank // 2), comm.Split(rank % 2)
if rank in (0, 3):
    row.Barrier()  # at: [0, 3]
    column.Barrier()
else:
    column.Barrier()  # at: [1, 2]
    row.Barrier()
