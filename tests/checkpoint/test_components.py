"""Components of replicas in checkpoints: equal files at any number of ranks, later objects."""

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cli import main
from tests.devices import assert_allclose
from tests.replica_groups import NUM_REPLICAS, replica_id
from tests.tree_reduction import expected_reduction, values_of

ON_READ = ms.VariableSynchronization.ON_READ
SUM = ms.VariableAggregation.SUM


def train(strategy):
    """Return a checkpoint of a program whose state depends on each of its replicas."""
    with strategy.scope():
        weights = ms.Variable(np.ones((7, 5), np.float32), name="weights")
        objects = {
            "weights": weights,
            "total": ms.Variable(np.zeros(3, "c8"), synchronization=ON_READ, aggregation=SUM),
            "half": ms.Variable(np.zeros((), "f2"), synchronization=ON_READ, aggregation=SUM),
            "optimizer": ms.optimizers.Adam(0.01, global_clipnorm=1.0),
            "mean": ms.metrics.Mean(),
            "accumulator": ms.optimizers.GradientAccumulator([weights]),
            "norm": ms.layers.BatchNorm(5, synchronized=True),
        }
    batches = strategy.experimental_distribute_dataset(
        ms.data.Dataset.from_arrays(values_of(0, (53, 5), "f4")).shuffle(seed=1).batch(10)
    )

    def step(x):
        gradient = values_of(replica_id(), (7, 5), "f4")
        objects["optimizer"].apply_gradients([(gradient, weights)])
        objects["accumulator"].add([(gradient, weights)])
        objects["total"].assign_add(values_of(replica_id(), 3, "c8"))
        objects["half"].assign(np.float16(replica_id()))
        objects["mean"].update_state(x)
        objects["norm"].forward(x)

    for each in batches:
        strategy.run(step, args=(each,))
    return ms.Checkpoint(batches=batches, **objects)


def contents(path):
    """Return the bytes of each data set and the attributes of each object but the root."""
    found = {}

    def look(name, node):
        data = node[()].tobytes() if isinstance(node, h5py.Dataset) and node.dtype != "O" else b""
        if isinstance(node, h5py.Dataset) and node.dtype == "O":
            data = node[()]
        found[name] = data, {key: str(value) for key, value in node.attrs.items()}

    with h5py.File(path) as file:
        file.visititems(look)
        root = {key: str(value) for key, value in file.attrs.items()}
    for name in ("created", "mpi_library", "digest"):  # the digest is that of the others
        root.pop(name)
    return found, root


@pytest.mark.parametrize("num", NUM_REPLICAS)
def test_files_do_not_depend_on_the_number_of_ranks(num, strategy, rank, mpi_tmp_path, capsys):
    of_ranks = ms.MPIStrategy(device="cpu", num_replicas=num)
    path = train(of_ranks).write(mpi_tmp_path / "ranks.h5")
    of_ranks.close()
    if rank == 0:
        alone = ms.OneDeviceStrategy("cpu:0", num_replicas=num)
        other = train(alone).write(mpi_tmp_path / "alone.h5")
        alone.close()
        of_both = contents(path), contents(other)
        # One rank alone says that it is one of several, whose names for files may meet.
        of_both[1][0]["variables"][1].pop("writers", None)
        assert of_both[0] == of_both[1]
        assert main(["verify", str(path), str(other)]) == 0
        assert main(["diff", str(path), str(other)]) == 0
        assert "equal" in capsys.readouterr().out
    strategy.barrier()


@pytest.mark.parametrize("num", NUM_REPLICAS)
def test_variables_made_after_the_restore_get_their_components(num, rank, size, mpi_tmp_path):
    replicas = ms.MPIStrategy(device="cpu", num_replicas=num)
    rows = [values_of(each, 3, "f4") for each in range(num)]

    def make(of):
        with of.scope():
            return ms.Variable(np.zeros(3, "f4"), synchronization=ON_READ, aggregation=SUM)

    total = make(replicas)
    replicas.run(lambda: total.assign(rows[replica_id()]))
    path = ms.Checkpoint(inner={"total": total}).write(mpi_tmp_path / "state.h5")
    expected = [rows[each].tobytes() for each in replicas.extended.local_replica_ids]
    other = ms.MPIStrategy(device="cpu", num_replicas=num + 1)
    for strategy, is_in_scope in ((replicas, True), (other, True), (replicas, False)):
        late = ms.Checkpoint()
        if is_in_scope:
            with strategy.scope():
                late.restore(path)
        else:
            late.restore(path)
        again = make(strategy)
        late.inner = {"total": again}
        if strategy is replicas:
            assert [each.tobytes() for each in again.values] == expected
        else:  # the aggregate, in equal parts
            assert len({each.tobytes() for each in again.values}) == 1
        assert_allclose(again.numpy(), expected_reduction("sum", rows), rtol=1e-5)
    with replicas.scope():  # a variable of another kind takes the aggregate
        late = ms.Checkpoint()
        late.restore(path)
        late.inner = {"total": ms.Variable(np.zeros(3, "f4"))}
    assert_allclose(late.inner["total"].numpy(), expected_reduction("sum", rows), 1e-6)


def test_commands_know_the_components(rank, strategy, mpi_tmp_path, capsys):
    replicas = ms.MPIStrategy(device="cpu", num_replicas=4)
    with replicas.scope():
        total = ms.Variable(np.zeros(3), synchronization=ON_READ, aggregation=SUM)
    paths = []
    for number, swapped in enumerate([0, 1]):
        # Equal aggregates of other components.
        replicas.run(
            lambda swapped=swapped: total.assign(np.full(3, float(replica_id() ^ swapped)))
        )
        paths.append(str(ms.Checkpoint(total=total).write(mpi_tmp_path / f"{number}.h5")))
    without = str(ms.Checkpoint(total=ms.Variable(np.zeros(3))).write(mpi_tmp_path / "without.h5"))
    if rank == 0:
        capsys.readouterr()
        assert main(["diff", *paths]) == 1
        out = capsys.readouterr().out
        assert "replicas/total" in out
        assert "largest difference 1, in 12 of 12 elements" in out
        assert main(["diff", paths[0], without]) == 1
        assert "only in a" in capsys.readouterr().out
        assert main(["inspect", paths[0]]) == 0
        out = capsys.readouterr().out
        assert "(4, 3)" in out
        assert "components of 1 variable" in out
        assert main(["inspect", "--json", paths[0]]) == 0
        assert '"replicas": {' in capsys.readouterr().out
        assert main(["inspect", "--json", without]) == 0
        assert '"replicas": {' not in capsys.readouterr().out
        with h5py.File(paths[0], "r+") as file:
            file["replicas/total"][2, 1] += 1
        assert main(["verify", paths[0]]) == 1
        assert "replicas/total" in capsys.readouterr().out
    strategy.barrier()


def test_other_arithmetic_is_a_warning_on_one_rank(mpi_tmp_path, rank, caplog, monkeypatch):
    path = mpi_tmp_path / "state.h5"
    strategy = ms.MPIStrategy(device="cpu", num_replicas=4)
    ranks = strategy.extended._collectives
    with strategy.scope():
        checkpoint = ms.Checkpoint(variable=ms.Variable(np.float32(1)))
    checkpoint.write(path)
    written = ranks.arithmetic
    for here, num_lines in (written, 0), ("0123456789abcdef", int(rank == 0)):
        monkeypatch.setattr(ranks, "arithmetic", here)
        caplog.clear()
        checkpoint.restore(path)
        lines = [
            each.message
            for each in caplog.records
            if each.levelname == "WARNING" and "different arithmetic" in each.message
        ]
        assert len(lines) == num_lines
        assert all(f"({written}, here {here})" in each for each in lines)
    strategy.close()
