"""What a strategy looks at when it is made: who shares a GPU, and who shares cores."""

import logging
import os

import pytest

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.mpi.world import open_world
from mpistrat.strategies import mpi
from mpistrat.strategies.devices import Offer
from mpistrat.system.text import counted

pytestmark = pytest.mark.host_memory  # these bring GPUs of their own


@pytest.fixture
def strict(monkeypatch):
    """Sharing is no longer allowed, as it is in tests."""
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "off")
    monkeypatch.setenv("MPISTRAT_OVERSUBSCRIBE", "off")


def test_ranks_that_would_share_a_gpu_are_refused_everywhere(strict, monkeypatch, size):
    monkeypatch.setattr(mpi, "make_offer", lambda *_: Offer(("the only one",), (True,), 0))
    found = []
    monkeypatch.setattr(
        mpi, "open_device_capabilities", lambda world, device, _: found.append(device)
    )
    if size > 1:
        with pytest.raises(ms.errors.LaunchError, match=f"{size} ranks, which see 1 GPU"):
            ms.MPIStrategy()
        assert found == []
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "on")
    with pytest.raises(TypeError):  # there is no such GPU: the ways to it are None
        ms.MPIStrategy()
    assert found == [Device("gpu", 0)]
    monkeypatch.undo()
    assert ms.MPIStrategy(device="cpu").reduce("sum", 1) == size


def test_shared_cores_are_a_warning_once(strict, caplog, size, rank):
    mpi._warn_of_shared_cores.cache_clear()
    with caplog.at_level(logging.WARNING, "mpistrat"):
        for _ in range(2):
            ms.MPIStrategy(device="cpu")
    text = f"{size} ranks on a node share {counted(len(os.sched_getaffinity(0)), 'core')}"
    lines = [line for line in caplog.messages if "on a node share" in line]
    is_over = size > len(os.sched_getaffinity(0))
    assert len(lines) == (is_over and rank == 0)
    assert all(line.startswith(text) for line in lines)


def test_the_world_knows_its_nodes(strategy, rank, size):
    world = open_world(None)
    assert world.node_of_rank == (0,) * size
    assert world.ranks_of_node == tuple(range(size))
    assert world.local_rank == rank
    assert world.num_cores == len(os.sched_getaffinity(0))


def test_torchrun_without_mpi_is_refused(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    if size > 1:  # MPI connects the ranks, whatever the variables say
        assert ms.MPIStrategy(device="cpu").size == size
        return
    with pytest.raises(ms.errors.LaunchError, match=r"torchrun.*mpistrat run -n 4") as info:
        ms.MPIStrategy()
    assert info.value._is_reported_elsewhere
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert ms.MPIStrategy(device="cpu").size == 1
