# kind: busy; odd: [1]
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
while rank == 1:  # at: [1]
    size += 1  # at: [1]
comm.Barrier()  # at: [0, *range(2, size)]
