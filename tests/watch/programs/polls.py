# kind: polling; odd: [1]; sizes: 3
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
while rank == 1 and not comm.Iprobe(source=0):
    pass
comm.Barrier()  # at: [0, *range(2, size)]
