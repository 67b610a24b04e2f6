"""Tests of pure code, which run once, outside of mpiexec, and what tests of `replicas` share."""

import pytest

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec("test_devices.py")


@pytest.fixture
def num(replicas):
    """Number of replicas on all ranks."""
    return replicas.num_replicas_in_sync


@pytest.fixture
def ids(replicas):
    """Numbers of the replicas on this rank."""
    return list(replicas.extended.local_replica_ids)
