"""Checkpoints of parameter-server jobs: the same files, on any number of servers and elsewhere."""

import numpy as np
import pytest

import mpistrat as ms


def make():
    table = ms.Variable(np.zeros((7, 2)), name="table")
    bias = ms.Variable(0.0, name="bias")
    optimizer = ms.optimizers.Adam(0.1)
    return {"table": table, "bias": bias, "optimizer": optimizer, "loss": ms.metrics.Mean("loss")}


def here(function, args):
    function(*args)


def train(objects, start, update=here):
    for number in range(3):
        gradient = np.arange(14.0).reshape(7, 2) + start + number
        objects["optimizer"].apply_gradients([(gradient, objects["table"]), (1.0, objects["bias"])])
        update(objects["loss"].update_state, (float(number),))


def facts(objects):
    slot = objects["optimizer"].slot(objects["table"], "first_moment")
    found = [objects["table"], objects["bias"], objects["optimizer"].iterations, slot]
    return [each.numpy().tolist() for each in found] + [float(objects["loss"].result())]


def on_chief(size, parts, body):
    partitioner = ms.partitioners.FixedShardsPartitioner(parts)
    strategy = ms.ParameterServerStrategy(max(0, size - 2), partitioner)
    with strategy.scope():
        objects = make()
    if strategy.rank:
        strategy.serve()
        return
    try:
        body(objects)
    finally:
        strategy.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_files_go_on_everywhere(mpi_tmp_path, size, parts):
    path = str(mpi_tmp_path / "run.h5")
    seen = []

    def write(objects):
        train(objects, 0)
        seen.extend(facts(objects))
        assert ms.Checkpoint(**objects).write(path) == path

    on_chief(size, parts, write)
    for other in (1, 3, 4):

        def restore(objects):
            train(objects, 5)
            status = ms.Checkpoint(**objects).restore(path)
            status.assert_consumed()
            assert facts(objects) == seen

        on_chief(size, other, restore)
    strategy = ms.MPIStrategy()
    with strategy.scope():
        objects = make()
        # The names of the slots are not known before a step.
        ms.Checkpoint(**objects).restore(path).assert_consumed()
    expected = strategy.broadcast_object(seen)
    assert facts(objects) == expected


def test_a_file_of_replicas_goes_on_here(mpi_tmp_path, size):
    path = str(mpi_tmp_path / "mirrored.h5")
    strategy = ms.MPIStrategy()
    with strategy.scope():
        objects = make()
        train(objects, 1, strategy.run)
        expected = facts(objects)
        ms.Checkpoint(**objects).write(path)

    def restore(objects):
        ms.Checkpoint(**objects).restore(path).assert_consumed()
        assert facts(objects) == expected
        train(objects, 2)
        assert objects["optimizer"].iterations.numpy() == 6

    on_chief(size, 2, restore)


def test_large_variables_travel_in_pieces(mpi_tmp_path, size):
    path = str(mpi_tmp_path / "large.h5")
    partitioner = ms.partitioners.FixedShardsPartitioner(3)
    strategy = ms.ParameterServerStrategy(max(0, size - 2), partitioner)
    value = np.arange(1_500_000.0).reshape(-1, 3)
    with strategy.scope():
        table = ms.Variable(value, name="table")
    if strategy.rank:
        strategy.serve()
        return
    checkpoint = ms.Checkpoint(table=table)
    checkpoint.write(path)
    table.assign(np.zeros_like(value), read_value=False)
    checkpoint.restore(path).assert_consumed()
    assert (table.numpy() == value).all()
    manager = ms.CheckpointManager(checkpoint, str(mpi_tmp_path / "kept"), asynchronous=True)
    saved = manager.save()
    manager.wait()
    assert ms.latest_checkpoint(str(mpi_tmp_path / "kept")) == saved
    strategy.close()
