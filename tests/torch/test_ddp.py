"""DistributedDataParallel with its options and hooks, against one process and against gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mpistrat.torch as mst
from mpistrat.errors import ReplicaDriftError
from tests.torch.reference import (
    STEPS,
    adam,
    batch,
    close,
    loss_of,
    network,
    parameters_of,
    train,
    train_alone,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SMALL_MIB = 50 / 2**20
"""Of buckets, so that a network of a few parameters has several."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": SMALL_MIB},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL_MIB},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
    ],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_it_trains_as_one_process(options, rank, size, world):
    model = DistributedDataParallel(network(), **options)
    close(train(model, rank), train_alone(network(), size))
    mst.assert_replicas_agree(model)


def test_parameters_begin_as_those_of_rank_0(rank, world):
    close(parameters_of(DistributedDataParallel(network(seed=rank))), parameters_of(network()))


class TwoHeads(nn.Module):
    """A network of which each call uses one head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](self.body(x).tanh())


@pytest.mark.parametrize("as_view", [False, True])
def test_parameters_that_a_rank_does_not_use(as_view, rank, size, world):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
    model, alone = DistributedDataParallel(TwoHeads(), **options), TwoHeads()
    ours, theirs = adam(model.parameters()), adam(alone.parameters())
    for step in range(STEPS):
        ours.zero_grad()
        loss_of(model(batch(rank, step), (rank + step) % 2)).backward()
        ours.step()
        theirs.zero_grad()
        losses = (loss_of(alone(batch(r, step), (r + step) % 2)) for r in range(size))
        (sum(losses) / size).backward()
        theirs.step()
    close(parameters_of(model), parameters_of(alone))
    # Nobody uses the last head.
    assert model.module.heads[2].weight.grad is None


class Recomputed(nn.Module):
    """A network that computes its activations twice, by autograd functions inside of others."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        return checkpoint(self.network, x.requires_grad_(), use_reentrant=True)


def test_a_static_graph_with_activation_checkpoints(rank, size, world):
    model = DistributedDataParallel(Recomputed(), static_graph=True, bucket_cap_mb=SMALL_MIB)
    close(train(model, rank), train_alone(Recomputed(), size))


def test_gradients_of_several_batches_travel_once(rank, size, world):
    model, alone = DistributedDataParallel(network()), network()
    with model.no_sync():
        for step in range(2):
            loss_of(model(batch(rank, step))).backward()
    assert size == 1 or not agree([each.grad for each in model.parameters()])
    loss_of(model(batch(rank, 2))).backward()
    for step in range(3):
        for each in range(size):
            (loss_of(alone(batch(each, step))) / size).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def agree(tensors):
    try:
        mst.assert_replicas_agree(tensors)
    except ReplicaDriftError:
        return False
    return True


def test_join_with_uneven_inputs(rank, size, world):
    model, alone = DistributedDataParallel(network()), network()
    ours, theirs = adam(model.parameters()), adam(alone.parameters())
    with Join([model]):
        for step in range(rank + 1):
            ours.zero_grad()
            loss_of(model(batch(rank, step))).backward()
            ours.step()
    for step in range(size):
        theirs.zero_grad()
        still = range(step, size)
        (sum(loss_of(alone(batch(each, step))) for each in still) / size).backward()
        theirs.step()
    # Those that have joined get the parameters of the last rank.
    close(parameters_of(model), parameters_of(alone))
    dist.barrier()


def test_join_can_raise_on_all_ranks_where_one_has_no_input(rank, size, world):
    if size == 1:
        pytest.skip("needs two ranks with other numbers of batches")
    model = DistributedDataParallel(network())
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        Join([model], throw_on_early_termination=True),
    ):
        for step in range(2 + (rank == 0)):
            loss_of(model(batch(rank, step))).backward()
    dist.barrier()


POWER_SGD = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 2,
    "min_compression_rate": 0.5,
}
HOOKS = {
    "all_reduce": (default_hooks.allreduce_hook, {}, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, {}, 0.02),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, POWER_SGD, 1e-4),
    "PowerSGD in fp16": (
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        POWER_SGD,
        0.05,
    ),
}
"""Hooks, options of their state, and by how much their sums may differ."""


def train_with_hook(name, rank, group=None, **options):
    """Return the parameters after some steps with a hook, which are equal on all ranks."""
    hook, state, _ = HOOKS[name]
    model = DistributedDataParallel(network(), process_group=group, **options)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(group, **state) if state else group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = train(model, rank, optimizer, steps=6)
    mst.assert_replicas_agree(model)
    return parameters


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks_do_as_over_gloo(name, rank, world, gloo):
    found = [train_with_hook(name, rank, group) for group in (None, gloo)]
    close(*found, HOOKS[name][2])
    before = parameters_of(network())
    assert all(not torch.equal(value, before[name]) for name, value in found[0].items())


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks_with_several_buckets(name, rank, world):
    # PowerSGD waits for collectives within callbacks of others, where gloo hangs.
    options = {"bucket_cap_mb": SMALL_MIB, "gradient_as_bucket_view": True}
    many, one = train_with_hook(name, rank, **options), train_with_hook(name, rank)
    close(many, one, 0.2 if "PowerSGD" in name else HOOKS[name][2])


class Normalized(nn.Module):
    """A network with buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(5)
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear(self.norm(x))


def test_buffers_are_those_of_rank_0_as_over_gloo(rank, world, gloo):
    found = []
    for group in (None, gloo):
        model = DistributedDataParallel(Normalized(), process_group=group)
        train(model, rank)
        with torch.no_grad():
            model(batch(rank, STEPS))
        # Each forward pass begins with the buffers of rank 0.
        found.append(dict(model.named_buffers()))
    close(*found)


def test_synchronized_batch_norm_is_refused_by_torch_on_every_rank(rank, size, world):
    if size == 1:
        pytest.skip("a rank alone needs no other")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normalized())
    with pytest.raises(ValueError, match="GPU"):
        DistributedDataParallel(model)(batch(rank, 0))
    dist.barrier()
    model.eval()
    torch.testing.assert_close(model(batch(rank, 0)), Normalized().eval()(batch(rank, 0)))


def test_two_networks_that_take_turns(rank, size, world):
    """As a generator and a discriminator do."""
    makers = network, lambda: nn.Linear(3, 5)

    def turns(first, second, ranks):
        optimizers = adam(first.parameters()), adam(second.parameters())
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
                losses = [loss_of(second(first(batch(each, step)))) for each in ranks]
                (sum(losses) / len(losses)).backward()
                optimizer.step()
        return parameters_of(first) | parameters_of(second)

    torch.manual_seed(1)
    pair = [make() for make in makers]
    copies = [make() for make in makers]
    for own, copy in zip(pair, copies, strict=True):
        copy.load_state_dict(own.state_dict())
    wrapped = [DistributedDataParallel(each) for each in pair]
    close(turns(*wrapped, [rank]), turns(*copies, range(size)))
