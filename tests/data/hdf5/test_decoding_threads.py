"""Threads that decode ahead: each has a core of its own while it works."""

import threading

import pytest

from mpistrat.data.hdf5.filters import DecodingThreads
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.system.cpu import current_core, own_cores

LIMIT_S = 60


@pytest.mark.skipif(
    current_core() is None or not 1 < len(own_cores()) == cores_of_rank(),
    reason="needs several cores that no other rank has too",
)
def test_threads_at_work_have_a_core_each_also_after_errors():
    threads = DecodingThreads()
    all_at_work = threading.Barrier(threads.count)

    def work(found, error):
        found.append(own_cores())
        all_at_work.wait(LIMIT_S)
        if error is not None:
            raise error

    try:
        for error in (ValueError("damaged"), None, None):
            found = []
            futures = [threads.submit(work, found, error) for _ in range(threads.count)]
            assert [future.exception(LIMIT_S) for future in futures] == [error] * threads.count
            assert {len(cores) for cores in found} == {1}
            assert frozenset().union(*found) <= own_cores()
            assert len(frozenset().union(*found)) == threads.count
    finally:
        threads.close()
