"""From which size on AUTO uses shared memory."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.comm.selection import choose_reducer


@pytest.fixture
def node(rank, monkeypatch):
    """Return what reduces in shared memory on a fresh channel, for a setting."""

    def make(text):
        monkeypatch.setenv("MPISTRAT_SHARED_MIN_BYTES", text)
        strategy = ms.MPIStrategy(MPI.COMM_WORLD.Dup(), device="cpu")
        node = strategy.extended._collectives.channel.transport.node
        if node is None:
            pytest.skip("no ranks share memory")
        return strategy, node

    return make


def test_it_can_be_given_and_ranks_take_the_largest(node, rank, size):
    _, found = node(str(1000 + rank))
    assert found.min_bytes == 1000 + size - 1


def test_it_is_measured_and_the_same_on_all_ranks(node):
    strategy, found = node("auto")
    assert found.min_bytes in (0, 2**14, 2**18, 2**19)
    assert len(set(strategy.extended._collectives.gather_json(found.min_bytes))) == 1


def test_auto_obeys_it_and_shared_does_not(node):
    strategy, _ = node("5000")
    transport = strategy.extended._collectives.channel.transport
    for implementation, num_bytes, is_shared in [
        (ms.CommunicationImplementation.AUTO, 4999, False),
        (ms.CommunicationImplementation.AUTO, 5000, True),
        (ms.CommunicationImplementation.SHARED, 4, True),
        (ms.CommunicationImplementation.MPI, 2**20, False),
    ]:
        options = ms.CommunicationOptions(implementation=implementation)
        reducer, why = choose_reducer(
            transport, options, ms.ReduceOp.SUM, np.dtype(np.float32), num_bytes
        )
        assert (reducer is transport.node) == is_shared, why
