# kind: ended; odd: [size - 1]; sizes: 3
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size


def total(value):
    return comm.allreduce(value)  # at: range(size - 1)


for step in range(3):
    if step < 2 or rank < size - 1:
        total(step)
