"""PyTorch within the replicas of a strategy with ``num_replicas=``."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpistrat as ms
from tests.replica_groups import replica_id

pytestmark = pytest.mark.usefixtures("world")

NUM = 5


@pytest.fixture
def replicas():
    strategy = ms.MPIStrategy(device="cpu", num_replicas=NUM)
    yield strategy
    strategy.close()


def trained(strategy):
    """Return the weights of a module that is trained as the page says, as bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    data = ms.data.Dataset.from_arrays((x, x[:, :1])).shuffle(seed=0).batch(11)

    def update(strategy, gradients):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.values[0]
        optimizer.step()

    def step(x, y):
        replica = ms.get_replica_context()
        torch.manual_seed(int(replica.rng(7, len(optimizer.state)).integers(2**31)))
        x = torch.nn.functional.dropout(torch.from_numpy(x), 0.2)
        loss = (model(x) - torch.from_numpy(y)).square().sum()
        gradients = replica.all_reduce("sum", torch.autograd.grad(loss, list(model.parameters())))
        replica.merge_call(update, (list(gradients),))

    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=batch)
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def test_training_has_the_bits_of_one_device(replicas):
    alone = ms.OneDeviceStrategy("cpu:0", num_replicas=NUM)
    assert trained(replicas) == trained(alone)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one scaler", "a scaler each"])
def test_an_overflow_in_one_replica_skips_the_step_of_all(replicas, is_shared):
    def make():
        model = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=4.0)

    of_rank = make()
    own_ones = replicas.run(make) if not is_shared else None

    def take(model, optimizer, scaler, gradients):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        scaler.step(optimizer)
        scaler.update()

    def merge(strategy, gradients):
        take(*of_rank, [each.values[0] for each in gradients])

    def step(bad, given):
        model, optimizer, scaler = of_rank if is_shared else given
        replica = ms.get_replica_context()
        x = torch.full((2, 3), torch.inf if replica_id() == bad else 1.0)
        loss = scaler.scale(model(x).sum())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        gradients = list(replica.all_reduce("sum", gradients))  # scaled: an overflow is in all
        if is_shared:
            replica.merge_call(merge, (gradients,))
        else:
            take(model, optimizer, scaler, gradients)
        return model.weight[0, 0].item(), scaler.get_scale()

    num_local = len(replicas.extended.local_replica_ids)
    weight, scale = replicas.run(step, args=(NUM - 1, own_ones))
    assert weight.values == (1.0,) * num_local
    assert scale.values == (2.0,) * num_local
    weight, _ = replicas.run(step, args=(-1, own_ones))
    assert weight.values == (pytest.approx(1.0 - 0.1 * 2 * NUM, abs=1e-6),) * num_local


def reduces():
    dist.all_reduce(torch.ones(2))


def reduces_later():
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def sends():
    dist.isend(torch.ones(2), (dist.get_rank() + 1) % dist.get_world_size())


def runs_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(3, 2)).sum().backward()


@pytest.mark.parametrize("operation", [reduces, reduces_later, sends, runs_ddp])
def test_operations_of_ranks_are_refused_in_replicas(replicas, operation, size):
    if operation is sends and size == 1:
        pytest.skip("torch sends nothing to itself")
    with pytest.raises(ms.errors.ContextError, match=r"torch\.\w+ is of the ranks.*merge_call"):
        replicas.run(operation)
    total = torch.ones(2)

    def merge(strategy):
        dist.all_reduce(total)  # once on each rank
        return total

    found = replicas.run(lambda: ms.get_replica_context().merge_call(merge))
    assert found.values[0].tolist() == [size, size]
