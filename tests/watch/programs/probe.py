# kind: unmatched message; odd: [0]
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
if rank == 0:
    comm.Probe(source=1, tag=9)  # at: [0]
