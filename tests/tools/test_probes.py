"""The communicator that counts: every operation, on it and on what comes from it."""

import numpy as np
import pytest

from mpistrat.options import ReduceOp
from tools.scaling.work import Work, all_reduce


@pytest.fixture
def calls():
    return []


@pytest.fixture
def comm(strategy, calls):
    from mpistrat.mpi.world import open_world
    from tools.scaling.counting import counted

    return counted(open_world(None).comm, calls)


def noted(calls):
    return [(call.operation, call.num_bytes, call.num_ranks) for call in calls]


def test_variants_of_an_operation_count_alike(comm, calls, size):
    send, receive = np.ones(5, np.float32), np.empty(5, np.float32)
    comm.Allreduce(send, receive)
    comm.Iallreduce(send, recvbuf=receive).Wait()
    assert noted(calls) == [("Allreduce", 20, size)] * 2
    np.testing.assert_array_equal(receive, size)


def test_a_persistent_operation_counts_at_each_start(comm, calls, size):
    send, receive = np.ones(3), np.empty(3)
    try:
        request = comm.Allreduce_init(send, receive)
    except NotImplementedError:
        pytest.skip("this MPI library is older than MPI 4.0")
    assert not calls
    for _ in range(2):
        request.Start()
        request.Wait()
    request.Free()
    assert noted(calls) == [("Allreduce", 24, size)] * 2
    np.testing.assert_array_equal(receive, size)


def test_bytes_are_those_of_the_largest_buffer(comm, calls, rank, size):
    from mpi4py import MPI

    part, everything = np.full(2, rank, np.int64), np.empty(2 * size, np.int64)
    comm.Allgather(part, [everything, MPI.INT64_T])
    comm.Gather(part, everything if rank == 0 else None)
    comm.Bcast(part)
    comm.Allreduce(MPI.IN_PLACE, part)
    comm.Barrier()
    assert noted(calls) == [
        ("Allgather", 16 * size, size),
        ("Gather", 16 * size, size),
        ("Bcast", 16, size),
        ("Allreduce", 16, size),
        ("Barrier", 0, size),
    ]


def test_what_comes_from_a_communicator_counts_too(comm, calls, rank):
    from mpi4py import MPI

    derived = {
        "Dup": comm.Dup(),
        "Split": comm.Split(rank % 2),
        "Split_type": comm.Split_type(MPI.COMM_TYPE_SHARED),
        "Dup of a split": comm.Split(0).Dup(),
    }
    for name, each in derived.items():
        calls.clear()
        each.Barrier()
        assert noted(calls) == [("Barrier", 0, each.size)], name


def test_the_work_of_all_calls_is_added_up(comm, calls, size):
    from tools.scaling.counting import total_work

    assert total_work(calls) == Work()
    for num_bytes in (8, 4096):
        comm.Allreduce(np.zeros(num_bytes, np.uint8), np.empty(num_bytes, np.uint8))
    assert total_work(calls) == all_reduce(size, 8) + all_reduce(size, 4096)


def test_a_strategy_on_it_is_counted(comm, calls, rank, size):
    import mpistrat as ms

    by_mpi = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.MPI)
    strategy = ms.MPIStrategy(comm, device="cpu", communication_options=by_mpi)
    array = np.full(1000, rank, np.float32)

    def reduce():
        calls.clear()
        return ms.get_replica_context().all_reduce(ReduceOp.SUM, array)

    (result,) = strategy.experimental_local_results(strategy.run(reduce))
    np.testing.assert_array_equal(result, size * (size - 1) / 2)
    assert ("Allreduce", array.nbytes, size) in noted(calls)
