"""Saves of variables that have drifted apart, over data files, and of state without a scope."""

import os
import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CheckpointError, ReplicaDriftError, ReplicaDriftWarning
from mpistrat.mpi.launcher import without_launcher
from mpistrat.testing import launch

LARGE = 2**18
"""Elements of a variable that all ranks write with ``parallel=True``."""


@pytest.fixture
def program(strategy, rank):
    """Return (checkpoint, drift): the second makes ranks differ in two variables and a slot."""
    with strategy.scope():
        small, large = ms.Variable(np.zeros(4), name="small"), ms.Variable(np.zeros(LARGE))
        sgd = ms.optimizers.SGD(0.1, momentum=0.9)
    strategy.run(lambda: sgd.apply_gradients([(np.zeros(4), small)]))

    def drift():
        small.storage[1] = large.storage[5] = sgd.slot(small, "momentum").storage[0] = rank + 1

    return ms.Checkpoint(small=small, large=large, sgd=sgd), drift


def values_in(path):
    with h5py.File(path) as file:
        variables = file["variables"]
        return variables["small"][1], variables["large"][5], variables["sgd/momentum/small"][0]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_save_of_drifted_variables_warns_once_and_has_rank_0s(
    strategy, program, size, mpi_tmp_path, parallel
):
    checkpoint, drift = program
    path = mpi_tmp_path / "run.h5"
    checkpoint.write(path, parallel=parallel)  # in which nothing has drifted
    drift()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ReplicaDriftWarning)
        for _ in range(2):
            checkpoint.write(path, parallel=parallel)
    drifted = [each for each in given if issubclass(each.category, ms.errors.ScopeWarning)]
    assert [each.category for each in drifted] == [ReplicaDriftWarning] * (size > 1)
    for each in drifted:
        for name in ("'small'", "'large'", "'sgd/momentum/small'"):
            assert name in str(each.message)
    assert values_in(path) == (1, 1, 1)


@pytest.mark.parametrize("parallel", [False, True])
def test_modules_and_optimizers_of_torch_are_compared(strategy, rank, size, mpi_tmp_path, parallel):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    adam.step()
    path = mpi_tmp_path / "torch.h5"
    checkpoint = ms.Checkpoint(model=model, adam=adam)

    def written():
        with warnings.catch_warnings(record=True) as given, strategy.scope():
            warnings.simplefilter("always", ReplicaDriftWarning)
            checkpoint.write(path, parallel=parallel)
        return [str(each.message) for each in given if each.category is ReplicaDriftWarning]

    model[1].running_mean += rank  # differs by nature
    assert written() == []
    with torch.no_grad():
        model[0].weight[3, 5] = adam.state[model[0].bias]["exp_avg"][1] = rank + 1
    texts = written()
    assert len(texts) == (size > 1)
    for text in texts:
        others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
        assert f"'model/0.weight' on {others}, 'adam/state/1/exp_avg' on {others}." in text
        assert "DistributedDataParallel" in text
    with h5py.File(path) as file:
        assert file["variables/model/0.weight"][3, 5] == 1
        assert np.abs(file["variables/model/1.running_mean"][()]).max() < 1
    if size > 1:
        with pytest.raises(ReplicaDriftError, match="0.weight"), strategy.scope():
            checkpoint.write(path, drift="raise")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_raises_instead_if_it_is_told_to(
    strategy, program, size, mpi_tmp_path, asynchronous
):
    checkpoint, drift = program
    manager = ms.CheckpointManager(
        checkpoint, mpi_tmp_path / "run", asynchronous=asynchronous, drift="raise"
    )
    manager.save(1)
    drift()
    if size == 1:
        manager.save(2)
    else:
        with pytest.raises(ReplicaDriftError, match="'small' on") as info:
            manager.save(2)
        assert isinstance(info.value, CheckpointError)
    manager.wait()
    assert len(manager.checkpoints) == (2 if size == 1 else 1)
    strategy.barrier()  # which is still usable


def test_a_save_may_ignore_drift(program, mpi_tmp_path):
    checkpoint, drift = program
    drift()
    checkpoint.write(mpi_tmp_path / "run.h5", drift="ignore")
    assert values_in(mpi_tmp_path / "run.h5") == (1, 1, 1)


def test_other_words_for_drift_and_overwrite_are_refused(program, mpi_tmp_path):
    checkpoint, _ = program
    with pytest.raises(ValueError, match="drift must be one of 'warn', 'raise', 'ignore'"):
        checkpoint.write(mpi_tmp_path / "run.h5", drift="no")
    with pytest.raises(TypeError, match="overwrite must be True or False"):
        checkpoint.write(mpi_tmp_path / "run.h5", overwrite=1)
    with pytest.raises(ValueError, match="drift must be"):
        ms.CheckpointManager(checkpoint, mpi_tmp_path / "run", drift=None)


def make_data_file(path):
    with h5py.File(path, "w") as file:
        file["image"] = [1, 2]


OTHER_FILES = {
    "data": make_data_file,
    "text": lambda path: path.write_text("precious"),
    "empty": lambda path: path.touch(),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_that_is_no_checkpoint_is_not_replaced(strategy, rank, mpi_tmp_path, kind):
    path = mpi_tmp_path / "data.h5"
    if rank == 0:
        OTHER_FILES[kind](path)
    strategy.barrier()
    before = path.read_bytes()
    with strategy.scope():
        checkpoint = ms.Checkpoint(weight=ms.Variable(np.zeros(2)))
    with pytest.raises(CheckpointError, match=r"overwrite=True"):
        checkpoint.write(path)
    assert path.read_bytes() == before
    strategy.barrier()
    checkpoint.write(path, overwrite=True)
    checkpoint.write(path)  # which is a checkpoint now
    checkpoint.restore(path).assert_consumed()


def test_a_manager_replaces_a_damaged_file_of_its_own_but_no_data(strategy, rank, mpi_tmp_path):
    with strategy.scope():
        checkpoint = ms.Checkpoint(weight=ms.Variable(np.zeros(2)))
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path)
    if rank == 0:
        (mpi_tmp_path / "checkpoint-7.h5").write_bytes(b"\x89HDF\r\n\x1a\ncut off")
        make_data_file(mpi_tmp_path / "checkpoint-8.h5")
    strategy.barrier()
    manager.save(7)
    checkpoint.restore(mpi_tmp_path / "checkpoint-7.h5").assert_consumed()
    with pytest.raises(CheckpointError, match="not a checkpoint, with 'image' at its top"):
        manager.save(8)


def save_states(rank, path):
    """Save what is equal, what differs and what is declared, without a scope; return the errors."""
    names = []
    for name, each in (
        ("equal", np.random.default_rng(1)),
        ("differs", np.random.default_rng(rank)),
        ("declared", ms.PerReplicaState(np.random.default_rng(rank))),
    ):
        try:
            ms.Checkpoint(state=each).write(os.fspath(path / f"{name}.h5"))
        except CheckpointError:
            names.append(name)
    return names


ONLY_STRATEGY = """
import gc
import numpy as np
import mpistrat as ms

gc.disable()
strategy = ms.MPIStrategy(device="cpu")
mine = np.random.default_rng(strategy.rank)
ms.Checkpoint(state=ms.PerReplicaState(mine)).write("declared.h5")
restored = np.random.default_rng(99)
checkpoint = ms.Checkpoint(state=ms.PerReplicaState(restored))
checkpoint.restore("declared.h5").assert_consumed()
assert restored.random() == np.random.default_rng(strategy.rank).random()
ms.Checkpoint(state=np.random.default_rng(1)).write("equal.h5")

second = ms.MPIStrategy(device="cpu")
second.close()
ms.Checkpoint(state=ms.PerReplicaState(mine)).write("after.h5")
third = ms.MPIStrategy(device="cpu")
del third
if strategy.rank == 0:
    gc.collect()
batches = ms.get_strategy().experimental_distribute_dataset(ms.data.Dataset.range(4).batch(2))
ms.Checkpoint(batches=batches).write("together.h5")
declared = ms.PerReplicaState(mine)
plain = ms.Variable(0.0)
for objects in ({"state": declared}, {"state": declared, "plain": plain}, {"state": mine}):
    try:
        ms.Checkpoint(**objects).write("refused.h5")
    except ms.errors.CheckpointError:
        print("refused")
try:
    ms.Checkpoint(state=declared, plain=plain).restore("declared.h5")
except ms.errors.CheckpointError as error:
    print("refused" * ("unknown to which" in str(error)))
"""


@pytest.mark.launches
@pytest.mark.parametrize("size", [2, 4])
def test_state_without_a_scope_is_of_the_one_open_strategy(size, tmp_path):
    # Where one rank alone has freed a strategy that nobody closed, all still choose the same way.
    done = launch.run(["-W", "ignore", "-c", ONLY_STRATEGY], size, 60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused") == 4 * size
    assert {each.name for each in tmp_path.iterdir()} >= {"after.h5", "together.h5"}


@pytest.mark.mpi(min_size=2)  # alone, other tests may have left the only strategy of replicas
def test_state_without_a_scope_beside_several_strategies_is_compared(strategy, rank, mpi_tmp_path):
    second = ms.MPIStrategy(device="cpu")
    assert save_states(rank, mpi_tmp_path) == ["differs", "declared"]
    second.close()


@pytest.mark.mpi(min_size=2)
def test_bytes_of_long_doubles_that_hold_no_value_are_not_compared(strategy, rank, mpi_tmp_path):
    state = np.frombuffer(bytes([rank + 1]) * 32, np.longdouble).copy()
    state[...] = 1.5

    class Box:
        def state_dict(self):
            return {"state": state}

        def load_state_dict(self, _):
            pass

    with strategy.scope():
        ms.Checkpoint(box=Box()).write(mpi_tmp_path / "run.h5")


SAVE = """
import warnings
import numpy as np
import mpistrat as ms

with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    ms.Checkpoint(state=np.random.default_rng(1)).write("run.h5")
print([f"{each.category.__name__}: {each.message}" for each in given])
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"WORLD_SIZE": "3", "RANK": "%d"}),
        ("srun", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "%d", "SLURM_STEP_NUM_TASKS": "3"}),
    ],
)
@pytest.mark.parametrize("task", [0, 2])
def test_a_process_without_a_connection_warns_of_its_save(tmp_path, launcher, variables, task):
    given = {name: text.replace("%d", str(task)) for name, text in variables.items()}
    done = subprocess.run(
        [sys.executable, "-c", SAVE],
        env=without_launcher() | given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if task == 0:
        assert done.stdout == "[]\n"
    else:
        assert "ScopeWarning: <string>:8: Checkpoint.write saves" in done.stdout
        assert f"process {task} of 3 that {launcher} started" in done.stdout
