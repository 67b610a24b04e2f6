"""torch.distributed.checkpoint into one HDF5 file, and back, on any number of ranks."""

import contextlib
import math
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mpistrat as ms
import mpistrat.torch as mst
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.testing import launch
from tests.torch.test_states import TENSORS as DENSE

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.mpi,
]

PROGRAM = Path(__file__).parent / "programs" / "dcp.py"


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "run.h5"


def save(state, path, **options):
    dcp.save(state, storage_writer=mst.HDF5Writer(path), **options)


def load(state, path, **options):
    dcp.load(state, storage_reader=mst.HDF5Reader(path), **options)
    return state


def whole(value):
    """Return a state with full tensors."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(whole, value))
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def equal(a, b):
    """Compare states to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.detach().contiguous().view(-1), b.detach().contiguous().view(-1))
    else:
        assert type(a) is type(b)
        assert a == b or a != a


def model(seed, is_sharded):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, dtype=torch.float64))
    if is_sharded:
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
    return module, torch.optim.Adam(module.parameters(), lr=0.1 * seed)


def train(module, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        hidden = module[0](torch.full((2, 3), 0.1 * step + 0.1))
        module[1](hidden.double()).square().sum().backward()
        optimizer.step()


def states(module, optimizer, **options):
    names = "model", "optimizer"
    found = get_state_dict(module, optimizer, options=StateDictOptions(**options))
    return dict(zip(names, found, strict=True))


def load_into(module, optimizer, path, **options):
    state = load(states(module, optimizer, **options), path)
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(**options),
    )


@pytest.mark.parametrize("is_saved_sharded", [True, False])
@pytest.mark.parametrize("is_loaded_sharded", [True, False])
def test_module_and_optimizer_come_back_sharded_or_not(path, is_saved_sharded, is_loaded_sharded):
    saved, loaded = model(1, is_saved_sharded), model(2, is_loaded_sharded)
    train(*saved)
    save(states(*saved), path)
    load_into(*loaded, path)
    equal(whole(states(*saved)), whole(states(*loaded)))
    train(*saved)
    train(*loaded)
    after = (whole(dict(each[0].state_dict())) for each in (saved, loaded))
    torch.testing.assert_close(*after)  # gradients of shards are means


def test_a_flattened_optimizer_and_cpu_offload(path):
    options = {"flatten_optimizer_state_dict": True, "cpu_offload": True}
    saved, loaded = model(1, True), model(2, True)
    train(*saved)
    save(states(*saved, **options), path)
    load_into(*loaded, path, **options)
    equal(whole(states(*saved)), whole(states(*loaded)))


def test_a_wrapped_module_is_saved_without_its_wrapper(path):
    saved, optimizer = model(1, False)
    wrapped = nn.parallel.DistributedDataParallel(saved)
    save(states(wrapped, optimizer), path)
    loaded = model(2, True)
    load_into(*loaded, path)
    equal(dict(saved.state_dict()), whole(dict(loaded[0].state_dict())))


TENSORS = {
    **DENSE,
    "large": torch.arange(300_000, dtype=torch.float64).reshape(3, 4, -1).permute(2, 0, 1),
}


@pytest.mark.parametrize("is_top", [True, False])
def test_any_dense_tensor_comes_back(path, is_top):
    state = dict(TENSORS) if is_top else {"model": dict(TENSORS)}
    save(state, path)
    blank = {key: torch.zeros_like(each) for key, each in TENSORS.items()}
    load(blank if is_top else {"model": blank}, path)
    equal({key: each.resolve_conj() for key, each in TENSORS.items()}, blank)
    with open_checkpoint(path) as reader:
        reader.verify()
        assert reader.variables["bfloat16" if is_top else "model/bfloat16"].dtype == np.uint16


VALUES = {
    "step": 3,
    "name": "Zürich",
    "nothing": None,
    "pair": (1, (2.5, "x")),
    "nan": float("inf"),
    "list": [1, [2, None]],
    "nested": {"a": {"b": True}, "losses": [0.5, 0.25], "a/b": 1, "dots.in.it": 2},
    "mixed": [torch.ones(2), 1, {"x": torch.zeros(1, dtype=torch.bfloat16), "y": ()}],
    "looks": {"x": {"$tensor": "float32"}},
}


def test_values_come_back_with_their_types(path):
    save(VALUES, path)
    blank = {
        "step": 0,
        "name": "",
        "nothing": 0,
        "pair": 0,
        "nan": 0.0,
        "list": [],
        "nested": {"a": {"b": 0}, "losses": [], "a/b": 0, "dots.in.it": 0},
        "mixed": [torch.zeros(2), 0, {"x": torch.ones(1, dtype=torch.bfloat16), "y": 0}],
        "looks": {"x": {"$tensor": 0}},
    }
    load(blank, path)
    mixed = blank.pop("mixed")
    equal({key: each for key, each in VALUES.items() if key != "mixed"}, blank)
    equal(dict(enumerate(VALUES["mixed"])), dict(enumerate(mixed)))


def meshes():
    """Return meshes of all ranks, with layouts for two dimensions."""
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    return [
        (init_device_mesh("cpu", (size,)), [[Shard(0)], [Shard(1)], [Replicate()]]),
        (
            init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("dp", "tp")),
            [
                [Replicate(), Shard(0)],
                [Shard(0), Shard(1)],
                [Shard(1), Replicate()],
                [Shard(0), Shard(0)],
            ],
        ),
    ]


def layouts(full):
    return {
        f"{number} {layout}": distribute_tensor(full, mesh, layout, src_data_rank=None)
        for number, (mesh, of_mesh) in enumerate(meshes())
        for layout in of_mesh
    }


@pytest.mark.parametrize("shape", [(7, 5), (1, 2), (9, 3, 4), (1001, 130)])
def test_tensors_of_any_layout_are_one_data_set_each(path, shape):
    full = torch.arange(float(math.prod(shape))).reshape(shape)
    saved = layouts(full)
    save({"model": saved}, path)
    if dist.get_rank() == 0:
        with h5py.File(path) as file:
            for name in saved:
                assert np.array_equal(file[f"variables/model/{name}"], full.numpy()), name
    # Each is loaded into the layout of another one.
    targets = dict(zip(saved, reversed(layouts(torch.zeros(shape)).values()), strict=True))
    load({"model": targets}, path)
    for each in targets.values():
        assert torch.equal(each.full_tensor(), full)
    plain = {name: torch.zeros(shape) for name in saved}
    load({"model": plain}, path)
    assert all(torch.equal(each, full) for each in plain.values())


def test_two_ways_of_sharding_at_once(path):
    size = dist.get_world_size()
    if size < 4:
        pytest.skip("needs a mesh of two dimensions")
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))

    def made(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
        parallel.parallelize_module(module, mesh["tp"], plan)
        return fully_shard(module, mesh=mesh["dp"])

    saved, loaded = made(1), made(2)
    save({"model": saved.state_dict()}, path)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    if dist.get_rank() == 0:
        with h5py.File(path) as file:
            for key, each in plain.state_dict().items():
                assert np.array_equal(file[f"variables/model/{key}"], each.numpy()), key
    state = load({"model": loaded.state_dict()}, path)["model"]
    equal(whole(dict(state)), dict(plain.state_dict()))
    ms.Checkpoint(model=made(3)).write(path.with_name("ours.h5"))
    ms.Checkpoint(model=loaded).restore(path).assert_consumed()
    equal(whole(dict(loaded.state_dict())), dict(plain.state_dict()))


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_checkpoint_restores_what_dcp_has_saved(path, is_named, is_sharded):
    saved = model(1, False)
    train(*saved)
    if is_named:
        state = states(*saved)
    else:
        state = {"model": saved[0].state_dict(), "optimizer": saved[1].state_dict()}
    save(state, path)
    loaded = model(2, is_sharded)
    ms.Checkpoint(model=loaded[0], optimizer=loaded[1]).restore(path).assert_consumed()
    equal(states(*saved), whole(states(*loaded)))


def test_the_reader_reads_what_a_checkpoint_has_saved(path):
    saved = model(1, True)
    train(*saved)
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    variable = np.arange(3.0)
    with mst.strategy().scope():
        values = ms.Variable(variable)
        ms.Checkpoint(model=saved[0], optimizer=saved[1], deep={"tied": tied}, own=values).write(
            path
        )
    loaded = model(2, False)
    train(*loaded)
    other = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    state = {
        "model": loaded[0].state_dict(),
        "optimizer": loaded[1].state_dict(),
        "deep": {"tied": other.state_dict()},
        "own": torch.zeros(3, dtype=torch.float64),
    }
    load(state, path)
    loaded[1].load_state_dict(state["optimizer"])
    equal(whole(states(*saved)), whole(states(*loaded)))
    equal(dict(tied.state_dict()), dict(other.state_dict()))
    assert state["own"].tolist() == variable.tolist()


def test_a_file_that_another_program_has_compressed(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(7000.0).reshape(70, 100)
    save({"model": {"w": full, "b": full.bfloat16()}}, path)
    if dist.get_rank() == 0:
        with h5py.File(path, "r+") as file:
            group = file["variables/model"]
            for name in "w", "b":
                values, attributes = group[name][()], dict(group[name].attrs)
                del group[name]
                group.create_dataset(name, data=values, chunks=(8, 30), compression="gzip")
                group[name].attrs.update(attributes)
    dist.barrier()
    own = {
        "w": distribute_tensor(torch.zeros(70, 100), mesh, [Shard(1)]),
        "b": torch.zeros(70, 100, dtype=torch.bfloat16),
    }
    load({"model": own}, path)
    equal(whole(own), {"w": full, "b": full.bfloat16()})


def test_what_the_file_tells(path):
    writer = mst.HDF5Writer("never.h5", step=7)
    for value in 1, 2:  # the second takes the place of the first
        state = {"w": torch.full((3,), float(value))}
        dcp.save(state, checkpoint_id=path, storage_writer=writer)
    with open_checkpoint(path) as reader:
        assert reader.header.step == 7
        assert reader.header.num_replicas == dist.get_world_size()
        assert reader.read_variable("w").tolist() == [2.0, 2.0, 2.0]
    assert os.listdir(path.parent) == [path.name]
    assert writer.checkpoint_id == str(path)
    assert mst.HDF5Writer.validate_checkpoint_id("a.h5")
    assert not mst.HDF5Writer.validate_checkpoint_id("folder")


def test_an_asynchronous_save_beside_collectives(path):
    group = dist.new_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(200_000.0).reshape(400, 500)
    weight = distribute_tensor(full, mesh, [Shard(0)])
    for _ in range(3):
        future = dcp.async_save(
            {"model": {"w": weight}, "step": 1},
            storage_writer=mst.HDF5Writer(path),
            process_group=group,
        )
        for _ in range(20):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert total[0] == dist.get_world_size()
        future.result()
    with torch.no_grad():
        weight.to_local().zero_()
    load({"model": {"w": weight}}, path)
    assert torch.equal(weight.full_tensor(), full)
    dist.destroy_process_group(group)


def errors_of(caught):
    """Return the errors of all ranks that have failed."""
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def refused(path, state, kind, words, **options):
    """Check that a save fails on all ranks and leaves no trace."""
    save({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    dist.barrier()
    with pytest.raises(CheckpointException) as caught:
        save(state, path, **options)
    found = errors_of(caught)
    assert any(isinstance(each, kind) and words in str(each) for each in found.values()), found
    dist.barrier()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    dist.barrier()


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ({"a": {"x": object()}}, TypeError, "value at 'a.x' of the state dict is neither"),
        ({"a": {"x": torch.float32}}, TypeError, "'a' holds a dtype at 'x'"),
        ({"a": (torch.ones(1),)}, TypeError, "'a' holds a tensor at '0'"),
        ({"a": {"x": np.array([b"x"])}}, TypeError, "'a' holds an array of dtype |S1 at 'x'"),
        (
            {"a": {"x": torch.ones(2).to_sparse()}},
            TypeError,
            "a sparse tensor of layout torch.sparse_coo",
        ),
        ({"a/b": torch.ones(2)}, ValueError, "the key 'a/b' at the top of the state dict"),
        ({"..": torch.ones(2)}, ValueError, "'..' cannot be the path"),
        (
            {"m": {"a": torch.ones(2), "a/b": torch.ones(2)}},
            ValueError,
            "'m/a' and 'm/a/b' cannot both be saved",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(path, state, kind, words):
    refused(path, {"w": torch.ones(3), **state}, kind, words)


def test_planners_that_would_lose_something_are_refused(path):
    flat = DefaultSavePlanner(flatten_state_dict=False)
    refused(path, {"a": {"x": 1}}, ValueError, "flatten_state_dict=True", planner=flat)
    with pytest.raises(ValueError, match="use_collectives at True"):
        save({"w": torch.ones(1)}, path, use_collectives=False)
    with contextlib.ExitStack() as stack:
        cached = DefaultSavePlanner(enable_plan_caching=True)
        stack.callback(forget_plans)
        save({"w": torch.ones(1)}, path, planner=cached)
        refused(path, {"w": torch.ones(1)}, ValueError, "enable_plan_caching=False", planner=cached)


def forget_plans():
    """Empty what torch keeps for the whole process."""
    for cache in "all_plans", "global_plan", "metadata", "save_plan", "final_save_plan":
        getattr(DefaultSavePlanner, f"_cached_{cache}").clear()


class FailsOnLast(DefaultSavePlanner):
    """Fails on the last rank alone, after some of its tensors."""

    def resolve_data(self, item):
        if dist.get_rank() == dist.get_world_size() - 1 and item.index.fqn.endswith("b"):
            raise RuntimeError("no memory on this rank")
        return super().resolve_data(item)


def test_a_rank_that_fails_alone_fails_all_and_leaves_the_old_file(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "m": {name: distribute_tensor(torch.ones(64, 3), mesh, [Shard(0)]) for name in "ab"},
    }
    refused(path, state, RuntimeError, "no memory on this rank", planner=FailsOnLast())


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(2)}, "/proc/never/run.h5")
    assert list(errors_of(caught)) == [0]
    assert "The checkpoint /proc/never/run.h5 cannot be written" in str(errors_of(caught)[0])


def test_damage_is_found_before_any_tensor_changes(path):
    full = torch.arange(100_000.0)
    save({"m": {"a": full, "b": full.clone()}, "step": 1}, path)
    if dist.get_rank() == 0:
        with open_checkpoint(path) as reader:
            offset = reader.extent_of("m/b").offset
        with open(path, "r+b") as file:
            file.seek(offset + 399_999)
            file.write(b"\x99")
    dist.barrier()
    own = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    with pytest.raises(CheckpointException) as caught:
        load({"m": own, "step": 0}, path)
    (error,) = errors_of(caught).values()
    assert isinstance(error, ms.errors.CheckpointCorruptError)
    assert f"The checkpoint {path} is damaged at m/b" in str(error)
    assert not own["a"].any()
    assert not own["b"].any()
    load({"m": {"a": own["a"]}}, path)  # the rest is sound
    assert torch.equal(own["a"], full)


def test_what_is_not_there_is_named(path):
    save({"m": {"a": torch.ones(2)}}, path)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: m.b"):
        load({"m": {"b": torch.ones(2)}}, path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"m": {"a": torch.ones(3)}}, path)
    with pytest.raises(CheckpointException, match="There is no file .*none.h5"):
        load({"m": {"a": torch.ones(2)}}, path.with_name("none.h5"))


@pytest.mark.parametrize("make", [mst.HDF5Writer, mst.HDF5Reader])
def test_bad_arguments(make):
    for given in 1, None, b"x":
        with pytest.raises(TypeError, match="needs a path"):
            make(given)
    with pytest.raises(ValueError, match="needs a path"):
        make("")
    for step in 1.5, True, "1":
        with pytest.raises(TypeError, match="step must be an integer"):
            mst.HDF5Writer("x.h5", step=step)


@pytest.mark.launches
def test_one_number_of_ranks_saves_and_another_loads(tmp_path):
    for what, ranks in (("save", 3), ("load", 4), ("alone", 1)):
        result = launch.run(["-W", "ignore", PROGRAM, what, tmp_path / "run.h5"], ranks)
        assert result.returncode == 0, result.stderr


@pytest.mark.launches
def test_a_group_of_another_backend(tmp_path):
    result = launch.run(["-W", "ignore", PROGRAM, "gloo", tmp_path / "run.h5"], 2)
    assert result.returncode == 0, result.stderr


@pytest.mark.launches
@pytest.mark.parametrize(("what", "victim"), [("killed", 0), ("killed async", 1)])
def test_a_rank_that_is_killed_in_the_middle_leaves_the_old_file(tmp_path, what, victim):
    path = tmp_path / "run.h5"
    variables = {"MPISTRAT_EXIT_GRACE_S": "2", "VICTIM": str(victim)}
    program = ["-W", "ignore", PROGRAM, what, path]
    result = launch.run(program, 2, 60, env=variables)
    assert result.returncode != 0
    assert (tmp_path / "began").exists(), result.stderr
    with open_checkpoint(path) as reader:
        reader.verify()
        assert reader.read_variable("m/w").tolist() == [[1.0] * 50] * 40
    result = launch.run(["-W", "ignore", PROGRAM, "again", path], 2)
    assert result.returncode == 0, result.stderr
    # The data of the killed save is gone: a job that is preempted often would fill the disk.
    assert not list(tmp_path.glob(".*.partial"))
