"""Where asynchronous operations are done: at once where all have come, else on a thread."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import triangle

pytestmark = pytest.mark.usefixtures("world")

SHORT, LONG = 1000, 2**19
LATE_S = 0.3


def thread_of(group):
    return group._queue._thread


@pytest.fixture
def group(world):
    made = dist.new_group(range(dist.get_world_size()))
    yield made
    dist.destroy_process_group(made)


@pytest.fixture(params=[True, False], ids=["a core to spare", "one core"])
def has_spare_core(request, monkeypatch, group):
    monkeypatch.setattr(group._queue, "_has_spare_core", request.param)
    return request.param


def test_alone_the_thread_is_for_long_operations_on_a_core_to_spare(group, size, has_spare_core):
    if size > 1:
        pytest.skip("for one rank")
    work = dist.all_reduce(torch.ones(SHORT), group=group, async_op=True)
    assert work.is_completed()
    assert thread_of(group) is None
    dist.all_reduce(torch.ones(LONG), group=group, async_op=True).wait()
    assert (thread_of(group) is not None) is has_spare_core


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.usefixtures("has_spare_core")
def test_whoever_comes_first_is_not_kept_waiting(group, rank, size, length):
    if size == 1:
        pytest.skip("needs ranks that come later")
    tensor = torch.full((length,), float(rank + 1))
    group.barrier().wait()
    if rank == size - 1:
        time.sleep(LATE_S)
    began = time.monotonic()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    issued_s = time.monotonic() - began
    if rank < size - 1:
        assert not work.is_completed()
    assert issued_s < LATE_S
    work.wait()
    assert torch.equal(tensor, torch.full((length,), float(triangle(size + 1))))


def test_callbacks_of_operations_done_at_once(group, rank, size):
    seen = []
    for number in range(50):
        tensor = torch.full((SHORT,), float(rank + number))
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        future.then(lambda done: seen.append(float(done.value()[0][0]))).wait()
    assert seen == [triangle(size) + size * number for number in range(50)]


def test_a_failing_operation_done_at_once_raises_in_wait(group):
    work = dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG, group, True)
    with pytest.raises(ValueError, match="AVG needs numbers"):
        work.wait()
    assert isinstance(work.exception(), ValueError)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_destroyed_group_refuses_each_operation(size, is_async):
    group = dist.new_group(range(size))
    for length in (SHORT, LONG):
        dist.all_reduce(torch.ones(length), group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    options = dist.AllreduceOptions()
    options.asyncOp = is_async
    for _ in range(3):
        work = group.allreduce([torch.ones(LONG)], options)
        with pytest.raises(RuntimeError, match="was destroyed"):
            work.wait()
