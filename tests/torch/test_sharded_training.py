"""Parameters and optimizers in shards, by torch's own classes, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import mpistrat as ms
import mpistrat.torch as mst
from tests.torch.reference import (
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


@pytest.fixture
def mesh(size, world):
    return init_device_mesh("cpu", (size,))


def shard_layers(model, mesh, **options):
    """Shard each layer with parameters, and the model."""
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class TestFullyShard:
    @pytest.mark.parametrize("reshard", [True, False])
    def test_it_trains_as_one_process(self, reshard, rank, size, mesh):
        model = shard_layers(network(), mesh, reshard_after_forward=reshard)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        close(train(model, rank), train_alone(network(), size))

    def test_shards_within_nodes_and_copies_between_them(self, rank, size, world):
        shape = (2, size // 2) if size % 2 == 0 else (1, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = shard_layers(network(), mesh)
        close(train(model, rank), train_alone(network(), size))

    def test_gradients_of_several_batches_travel_once(self, rank, size, mesh):
        model, alone = shard_layers(network(), mesh), network()
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model(batch(rank, step))).backward()
            for each in range(size):
                (loss_of(alone(batch(each, step))) / size).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    def test_bfloat16_does_as_over_gloo(self, rank, mesh, gloo):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found = []
        for each in (mesh, DeviceMesh.from_group(gloo, "cpu")):
            model = shard_layers(network(), each, mp_policy=policy)
            loss_of(model(batch(rank, 0))).backward()
            found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        close(*found, 1e-3)

    def test_norms_of_gradients_are_clipped_as_in_one_process(self, rank, size, mesh):
        model, alone = shard_layers(network(), mesh), network()
        loss_of(model(batch(rank, 0))).backward()
        (sum(loss_of(alone(batch(each, 0))) for each in range(size)) / size).backward()
        ours, theirs = (
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, alone)
        )
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("is_async", [False, True])
def test_distributed_checkpoint_saves_and_loads(is_async, rank, mesh, shared_tmp_path):
    model, other = (shard_layers(network(seed), mesh) for seed in (0, 1))
    expected = train(model, rank)
    state = {"model": get_model_state_dict(model)}
    if is_async:
        dcp.async_save(state, checkpoint_id=shared_tmp_path / "dcp").result()
    else:
        dcp.save(state, checkpoint_id=shared_tmp_path / "dcp")
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=shared_tmp_path / "dcp")
    set_model_state_dict(other, state["model"])
    close(parameters_of(other), expected, 0)


class Bundle:
    """State dicts of a model and its optimizer with whole tensors, which a checkpoint takes."""

    def __init__(self, model, optimizer):
        self.parts = model, optimizer
        self.options = StateDictOptions(full_state_dict=True)

    def state_dict(self):
        model, optimizer = get_state_dict(*self.parts, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            *self.parts,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class TestFullyShardedDataParallel:
    @pytest.mark.parametrize("kind", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    def test_it_trains_as_one_process(self, kind, rank, size, world):
        model = self.made(sharding_strategy=ShardingStrategy[kind])
        train(model, rank)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        close(whole, train_alone(network(), size))

    def made(self, seed=0, **options):
        return FullyShardedDataParallel(
            network(seed), device_id=torch.device("cpu"), use_orig_params=True, **options
        )

    def test_its_checkpoint_is_refused_with_the_way_out(self, world, shared_tmp_path):
        with pytest.raises(TypeError, match=r"flat: use fully_shard.*get_state_dict"):
            ms.Checkpoint(model=self.made()).write(shared_tmp_path / "model.h5")
        assert not list(shared_tmp_path.iterdir())

    def test_its_whole_state_can_be_saved(self, rank, world, shared_tmp_path):
        model = self.made()
        optimizer = adam(model.parameters())
        train(model, rank, optimizer)
        ms.Checkpoint(whole=Bundle(model, optimizer)).write(shared_tmp_path / "model.h5")
        other = self.made(seed=1)
        other_optimizer = adam(other.parameters())
        train(other, rank, other_optimizer, steps=1)
        ms.Checkpoint(whole=Bundle(other, other_optimizer)).restore(shared_tmp_path / "model.h5")
        for pair in ((model, optimizer), (other, other_optimizer)):
            train(pair[0], rank, pair[1])
        options = StateDictOptions(full_state_dict=True)
        close(*(get_model_state_dict(each, options=options) for each in (model, other)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestZeroRedundancyOptimizer:
    @pytest.mark.parametrize("as_view", [False, True])
    def test_it_trains_as_one_process(self, as_view, rank, size, world):
        model = DistributedDataParallel(network())
        optimizer = self.made(model, parameters_as_bucket_view=as_view)
        close(train(model, rank, optimizer), train_alone(network(), size))
        mst.assert_replicas_agree(model)

    def made(self, model, **options):
        # Not at the top: the import warns.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.05, **options
        )

    def test_its_state_is_gathered_to_one_rank(self, rank, size, world):
        model = DistributedDataParallel(network())
        optimizer = self.made(model)
        train(model, rank, optimizer)
        optimizer.consolidate_state_dict(to=size - 1)
        dist.barrier()
        if rank < size - 1:
            return
        alone = network()
        own = adam(alone.parameters())
        for step in range(4):
            own.zero_grad()
            (sum(loss_of(alone(batch(each, step))) for each in range(size)) / size).backward()
            own.step()
        ours, theirs = optimizer.state_dict()["state"], own.state_dict()["state"]
        for key, state in theirs.items():
            torch.testing.assert_close(ours[key]["exp_avg"], state["exp_avg"])


class TestDTensor:
    LAYOUTS = (Replicate(), Shard(0), Shard(1))

    @pytest.mark.parametrize("target", LAYOUTS, ids=str)
    @pytest.mark.parametrize("source", LAYOUTS, ids=str)
    def test_redistribution(self, source, target, mesh):
        whole = torch.arange(35.0).reshape(7, 5)
        moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
        assert torch.equal(moved.full_tensor(), whole)
        assert torch.equal(moved.to_local(), distribute_tensor(whole, mesh, [target]).to_local())

    @pytest.mark.parametrize("target", LAYOUTS, ids=str)
    def test_partial_sums(self, target, rank, size, mesh):
        own = torch.arange(35.0).reshape(7, 5) + rank
        summed = DTensor.from_local(own, mesh, [Partial()]).redistribute(mesh, [target])
        expected = size * torch.arange(35.0).reshape(7, 5) + size * (size - 1) / 2
        assert torch.equal(summed.full_tensor(), expected)

    def test_operations_of_sharded_tensors(self, mesh):
        a, b = torch.arange(12.0).reshape(4, 3), torch.arange(15.0).reshape(3, 5)
        product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Shard(1)])
        assert torch.equal(product.full_tensor(), a @ b)
        assert distribute_tensor(a, mesh, [Shard(1)]).sum().full_tensor() == a.sum()


def even_network(seed=0):
    """Return a network with a layer that any number of ranks up to 4 divides."""
    return network(seed, width=12)


class TestTensorParallel:
    PLAN = (
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())},
    )

    @pytest.mark.parametrize("plan", PLAN)
    def test_it_trains_as_one_process(self, plan, mesh):
        model = parallelize_module(even_network(), mesh, plan)
        # All ranks work on the same batch.
        close(train(model, 0), train_alone(even_network(), 1))

    def test_norms_on_parts_of_the_sequence(self, rank, size, mesh):
        def made():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 5))

        model = parallelize_module(made(), mesh, {"0": SequenceParallel()})
        x = torch.randn(2, 4 * size, 5, generator=torch.Generator().manual_seed(0))
        ours = model[0](distribute_tensor(x, mesh, [Shard(1)]))
        assert ours.placements == (Shard(1),)
        torch.testing.assert_close(ours.full_tensor(), made()[0](x))

    def test_together_with_shards(self, rank, size, world):
        width = 2 if size % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (size // width, width), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(even_network(), mesh["tp"], self.PLAN[0])
        fully_shard(model, mesh=mesh["dp"])
        close(train(model, rank // width), train_alone(even_network(), size // width))


def test_a_sharded_checkpoint_of_tensor_parallel_parameters(mesh, shared_tmp_path):
    model = parallelize_module(even_network(), mesh, TestTensorParallel.PLAN[0])
    expected = parameters_of(model)
    ms.Checkpoint(model=model).write(shared_tmp_path / "model.h5")
    plain = even_network(seed=1)
    ms.Checkpoint(model=plain).restore(shared_tmp_path / "model.h5").assert_consumed()
    close(parameters_of(plain), expected, 0)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_trains_as_one_process(schedule, rank, size, world):
    def stages():
        torch.manual_seed(0)
        return [torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in range(size)]

    own = stages()[rank]
    stage = pipelining.PipelineStage(own, rank, size, torch.device("cpu"))
    run = getattr(pipelining, schedule)(
        stage, n_microbatches=size, loss_fn=lambda output, target: (output - target).square().mean()
    )
    x, target = batch(0, 0, 4 * size), batch(0, 1, 4 * size)
    if rank == 0:
        run.step(x, **({"target": target} if size == 1 else {}))
    elif rank == size - 1:
        run.step(target=target)
    else:
        run.step()
    alone = torch.nn.Sequential(*stages())
    (alone(x) - target).square().mean().backward()
    for ours, theirs in zip(own.parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
