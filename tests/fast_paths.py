"""Strategies that take each way through a collective, for tests that compare their bits."""

import contextlib
import os
from unittest import mock

import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.comm import hierarchical, mpi_transport

WAYS = ["memory", "nodes", "messages"]
"""How ranks reach each other where fast paths are on: in memory that all share, as ranks of two
nodes, and by MPI alone. The slow way, to which they are compared, is that of `OFF`."""
OFF = "off"


def _node_of(comm):
    """Return the ranks of this rank's node, as if there were two."""
    return [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]


@contextlib.contextmanager
def _environment(way):
    variables = {"MPISTRAT_FAST_PATHS": "off" if way == OFF else "on"}
    if way == "memory":
        variables["MPISTRAT_SHARED_MIN_BYTES"] = "0"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        if way == "nodes":
            stack.enter_context(mock.patch.object(hierarchical, "ranks_of_node", _node_of))
        if way == "messages":
            nothing = mock.Mock(return_value=(None, True))
            stack.enter_context(mock.patch.object(mpi_transport, "share_memory", nothing))
        yield


@contextlib.contextmanager
def opened(way, make=ms.MPIStrategy, **arguments):
    """Give a strategy on a communicator of its own, whose ranks reach each other in this `way`."""
    comm = MPI.COMM_WORLD.Dup()
    with _environment(way):
        strategy = make(comm, device="cpu", **arguments)
    assert strategy.extended._collectives.channel.transport.has_fast_paths == (way != OFF)
    try:
        yield strategy
    finally:
        strategy.close()
        comm.Free()


@contextlib.contextmanager
def all_opened(ways=(*WAYS, OFF), **arguments):
    """Give the strategies of several `ways`, by way."""
    with contextlib.ExitStack() as stack:
        yield {way: stack.enter_context(opened(way, **arguments)) for way in ways}


def thorough_but(names, quick):
    """Return parameters of a test, of which ``make test`` takes the quick ones alone."""
    thorough = pytest.mark.thorough
    return [each if each in quick else pytest.param(each, marks=thorough) for each in names]
