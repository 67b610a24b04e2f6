# kind: ended; odd: [size - 1]
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
request = comm.Barrier_init()
request.Start()
request.Wait()
if rank < size - 1:
    request.Start()
    request.Wait()  # at: range(size - 1)
