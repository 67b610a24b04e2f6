"""Optimizers whose slots are divided among the ranks: the steps of mirrored slots, to the bit."""

import copy

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.sharding import part_lengths
from tests.devices import array_equal, assert_allclose
from tests.fast_paths import thorough_but
from tests.helpers import as_bytes, triangle

SHAPES = {
    "matrix": ((700, 700), "f4"),  # large enough to be summed in parts
    "vector": ((300_001,), "f8"),
    "complex": ((500, 400), "c8"),
    "scalar": ((), "f8"),
    "few": ((3,), "f4"),
    "none": ((0, 3), "f4"),
    "half": ((9,), "f2"),
}
ADAM, SGD = ms.optimizers.Adam, ms.optimizers.SGD
OPTIMIZERS = {
    "adam": lambda **more: ADAM(0.1, **more),
    "momentum": lambda **more: SGD(0.1, momentum=0.9, **more),
    "nesterov": lambda **more: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **more),
    "clipped": lambda **more: ADAM(0.1, global_clipnorm=0.5, weight_decay=0.1, **more),
    "scaled": lambda **more: ADAM(0.1, loss_scale=ms.optimizers.LossScale(8.0), **more),
    "scheduled": lambda **more: ADAM(lambda step: 0.1 / (step + 1), **more),
}


def make(strategy, optimizer, **more):
    with strategy.scope():
        variables = {
            name: ms.Variable(np.random.default_rng(7).normal(size=shape).astype(dtype), name=name)
            for name, (shape, dtype) in SHAPES.items()
        }
        return variables, OPTIMIZERS[optimizer](**more)


def gradients_of(number, rank, size):
    """Dense ones at first; later one in slices, whose rows overlap, and one that is missing."""
    rng = np.random.default_rng([number, rank])
    found = {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}
    if number == 2:
        rows = rng.normal(size=(3, 700)).astype("f4")
        found["matrix"] = ms.IndexedSlices(rows, np.array([5, 5, 699 - rank]))
    if number == 3:
        found["vector"] = None
    return found


def train(strategy, variables, optimizer, rank, size, numbers=range(4)):
    for number in numbers:
        found = gradients_of(number, rank, size)
        pairs = [(found[name], variable) for name, variable in variables.items()]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))


def state(variables, optimizer):
    names = optimizer._rule.kernel.slots
    slots = [optimizer.slot(each, name) for each in variables.values() for name in names]
    return [as_bytes(each.numpy()) for each in [*variables.values(), *slots]]


def own_bytes(variables, optimizer):
    names = optimizer._rule.kernel.slots
    slots = [optimizer.slot(each, name) for each in variables.values() for name in names]
    return sum(slot.part.nbytes for slot in slots), sum(slot.numpy().nbytes for slot in slots)


@pytest.mark.filterwarnings("ignore:No gradient")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.thorough)
        if name in ("momentum", "scheduled")
        else name
        for name in OPTIMIZERS
    ],
)
def test_steps_are_those_of_mirrored_slots(strategy, rank, size, optimizer):
    results = []
    for is_sharded in (False, True):
        variables, made = make(strategy, optimizer, sharded_slots=is_sharded)
        train(strategy, variables, made, rank, size)
        results.append(state(variables, made))
        strategy.extended.assert_replicas_agree(list(variables.values()))
    assert results[0] == results[1]


def test_each_rank_keeps_its_part_of_the_slots(strategy, rank, size):
    variables, adam = make(strategy, "adam", sharded_slots=True)
    train(strategy, variables, adam, rank, size, [0])
    own, whole = own_bytes(variables, adam)
    assert own <= whole / size + 16 * 2 * len(variables)
    slot = adam.slot(variables["few"], "first_moment")
    assert slot.shape == (3,)
    assert len(slot.part) == len(slot.row_range) == part_lengths(3, size)[rank]
    assert slot.numpy().tobytes() == slot.value().tobytes() == slot[:].tobytes()
    assert array_equal(slot.lookup([2, 0]), slot.numpy()[[2, 0]])
    slot.assign(np.arange(3.0))
    assert slot.part.tolist() == list(slot.row_range)
    with strategy.scope():
        slot.scatter_add(ms.IndexedSlices(np.ones(2), [1, 1]))
    assert slot.numpy().tolist() == [0, 3, 2]


def test_gradients_that_are_summed_already(strategy, rank, size):
    variables, momentum = make(strategy, "momentum", sharded_slots=True)
    before = variables["matrix"].numpy()
    ones = np.ones((700, 700), "f4")
    for _ in range(2):
        momentum.apply_gradients([(ones, variables["matrix"])])
    assert_allclose(before - variables["matrix"].numpy(), 0.29, rtol=1e-4)
    strategy.extended.assert_replicas_agree(variables["matrix"])


def test_a_gradient_that_is_memory_of_a_weight(strategy, rank, size):
    """As `weight.value()` is, or that of another weight of the step."""
    results = []
    for is_sharded in (False, True):
        with strategy.scope():
            first, second = (ms.Variable(np.full((600, 600), n + 1.0)) for n in range(2))
            momentum = SGD(0.1, momentum=0.5, sharded_slots=is_sharded)
        for _ in range(3):
            pairs = [(second.value(), first), (first.value().T, second)]
            strategy.run(momentum.apply_gradients, args=(pairs,))
        results.append(as_bytes(first.value()) + as_bytes(second.value()))
    assert results[0] == results[1]


def test_a_step_that_overflows_is_skipped(strategy, rank, size):
    variables, scaled = make(strategy, "scaled", sharded_slots=True)
    before = state({"few": variables["few"]}, SGD(1.0))
    bad = np.full(3, np.inf if rank == size - 1 else 1.0, "f4")
    strategy.run(lambda: scaled.apply_gradients([(bad, variables["few"])]))
    assert state({"few": variables["few"]}, SGD(1.0)) == before


def test_other_variables_are_as_without(strategy, rank, size):
    """Plain ones, and those that are sharded themselves."""
    plain, adam = ms.Variable(np.zeros(3)), ADAM(0.1, sharded_slots=True)
    adam.apply_gradients([(np.ones(3), plain)])
    assert adam.slot(plain, "first_moment").part.shape == (3,)
    partitioner = ms.partitioners.FixedShardsPartitioner(3)
    cutting = ms.MPIStrategy(variable_partitioner=partitioner)
    with cutting.scope():
        table, bias = ms.Variable(np.zeros((5, 2))), ms.Variable(1.0)
        momentum = SGD(0.1, momentum=0.9, sharded_slots=True)
    gradients = [(np.full((5, 2), rank + 1.0), table), (1.0, bias)]
    cutting.run(lambda: momentum.apply_gradients(gradients))
    assert_allclose(table.numpy(), -0.1 * triangle(size + 1))
    assert_allclose(bias.numpy(), 1 - 0.1 * size)
    assert momentum.slot(table, "momentum").row_range == table.row_range
    cutting.close()


def test_accumulated_gradients(strategy, rank, size):
    results = []
    for is_sharded in (False, True):
        variables, adam = make(strategy, "adam", sharded_slots=is_sharded)
        accumulator = ms.optimizers.GradientAccumulator(list(variables.values()))

        def step(accumulator=accumulator, adam=adam, variables=variables):
            for number in range(2):
                found = gradients_of(number, rank, size)
                accumulator.add([(found[name], each) for name, each in variables.items()])
            accumulator.apply(adam)

        strategy.run(step)
        results.append(state(variables, adam))
    assert results[0] == results[1]


def test_ranks_that_disagree(strategy, rank, size, others):
    with (
        pytest.raises(ms.errors.CollectiveMismatchError, match="sharded_slots=True"),
        strategy.scope(),
    ):
        ADAM(0.1, sharded_slots=rank == 0)


def test_what_is_refused(strategy):
    with pytest.raises(ValueError, match="without momentum there are none"):
        SGD(0.1, sharded_slots=True)
    for bad in (1, None, "yes"):
        with pytest.raises(TypeError, match="must be a bool"):
            ADAM(0.1, sharded_slots=bad)
    assert "sharded_slots=True" in repr(ADAM(0.1, sharded_slots=True))
    assert "sharded" not in repr(ADAM(0.1))


# Checkpoints

PATH = "run.h5"


@pytest.mark.parametrize(
    ("ways", "parallel"),
    [
        ((True, False), True),
        ((False, True), False),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ((True, False), False),
                ((False, True), True),
                ((True, True), False),
                ((True, True), True),
            ]
        ),
    ],
    ids=str,
)
def test_a_file_does_not_tell_how_slots_were_held(
    strategy, shared_tmp_path, rank, size, parallel, ways
):
    path = shared_tmp_path / PATH
    variables, adam = make(strategy, "adam", sharded_slots=ways[0])
    train(strategy, variables, adam, rank, size, [0, 1])
    saved = state(variables, adam)
    ms.Checkpoint(adam=adam, **variables).write(path, parallel=parallel)
    if rank == 0:
        with h5py.File(path) as file:
            for name, (shape, _) in SHAPES.items():
                assert file[f"variables/adam/first_moment/{name}"].shape == shape
        with open_checkpoint(str(path)) as reader:
            reader.verify()
    restored, other = make(strategy, "adam", sharded_slots=ways[1])
    ms.Checkpoint(adam=other, **restored).restore(path).assert_consumed()
    assert state(restored, other) == saved
    train(strategy, variables, adam, rank, size, [1])
    train(strategy, restored, other, rank, size, [1])
    assert state(restored, other) == state(variables, adam)


def test_a_restore_before_the_slots_are_there(strategy, shared_tmp_path, rank, size):
    path = shared_tmp_path / PATH
    variables, adam = make(strategy, "adam", sharded_slots=True)
    train(strategy, variables, adam, rank, size, [0])
    ms.Checkpoint(adam=adam, **variables).write(path)
    restored, other = make(strategy, "adam", sharded_slots=True)
    status = ms.Checkpoint(adam=other, **restored).restore(path)
    train(strategy, restored, other, rank, size, [1])
    train(strategy, variables, adam, rank, size, [1])
    status.assert_consumed()
    assert state(restored, other) == state(variables, adam)


def test_a_manager_saves_in_the_background(strategy, shared_tmp_path, rank, size):
    variables, adam = make(strategy, "adam", sharded_slots=True)
    train(strategy, variables, adam, rank, size, [0])
    checkpoint = ms.Checkpoint(adam=adam, **variables)
    manager = ms.CheckpointManager(checkpoint, shared_tmp_path / "runs", asynchronous=True)
    saved = state(variables, adam)
    manager.save()
    train(strategy, variables, adam, rank, size, [1])
    manager.wait()
    restored, other = make(strategy, "adam", sharded_slots=True)
    ms.Checkpoint(adam=other, **restored).restore(manager.latest_checkpoint)
    assert state(restored, other) == saved


def test_a_copy_goes_on_alone(strategy, rank, size):
    variables, adam = make(strategy, "adam", sharded_slots=True)
    train(strategy, variables, adam, rank, size, [0])
    twins, twin = copy.deepcopy((variables, adam))
    train(strategy, twins, twin, rank, size, [1])
    train(strategy, variables, adam, rank, size, [1])
    assert state(twins, twin) == state(variables, adam)


FLOATS = {"matrix": (130, 70), "table": (600, 500), "vector": (41,), "few": (3,), "scalar": ()}
"""Shapes of dense float32 variables, of which a program repeats every step alike."""


def make_floats(strategy, optimizer, **more):
    with strategy.scope():
        variables = {
            name: ms.Variable(np.ones(shape, np.float32), name=name)
            for name, shape in FLOATS.items()
        }
        return variables, OPTIMIZERS[optimizer](**more)


def train_alike(strategy, variables, optimizer, numbers):
    def step(number):
        replica = ms.get_replica_context().replica_id_in_sync_group
        rng = np.random.default_rng([number, replica])
        found = {name: rng.normal(size=shape).astype("f4") for name, shape in FLOATS.items()}
        optimizer.apply_gradients([(found[name], each) for name, each in variables.items()])

    for number in numbers:
        strategy.run(step, args=(number,))


@pytest.fixture(params=[None, 5])
def replicated(request):
    """A strategy of one replica on each rank, and one of five over all ranks."""
    comm = MPI.COMM_WORLD.Dup()
    strategy = ms.MPIStrategy(comm, device="cpu", num_replicas=request.param)
    yield strategy
    strategy.close()
    comm.Free()


@pytest.mark.parametrize("optimizer", thorough_but(OPTIMIZERS, ["adam", "momentum"]))
def test_steps_that_are_repeated_alike(replicated, optimizer):
    """Dense gradients of one dtype, for which every later step may be prepared."""
    results = []
    for is_sharded in (False, True):
        variables, made = make_floats(replicated, optimizer, sharded_slots=is_sharded)
        for number in range(4):
            train_alike(replicated, variables, made, [number])
            results.append(state(variables, made))
            replicated.extended.assert_replicas_agree(list(variables.values()))
    assert results[:4] == results[4:]


@pytest.mark.parametrize(
    "ways", thorough_but([(True, False), (False, True), (True, True)], [(True, False)]), ids=str
)
def test_checkpoints_between_steps_that_are_repeated_alike(replicated, shared_tmp_path, ways):
    path = shared_tmp_path / PATH
    variables, adam = make_floats(replicated, "adam", sharded_slots=ways[0])
    train_alike(replicated, variables, adam, range(3))
    ms.Checkpoint(adam=adam, **variables).write(path)
    restored, other = make_floats(replicated, "adam", sharded_slots=ways[1])
    train_alike(replicated, restored, other, [7, 8])  # which the file overwrites
    ms.Checkpoint(adam=other, **restored).restore(path).assert_consumed()
    assert state(restored, other) == state(variables, adam)
    for optimizer, those in ((adam, variables), (other, restored)):
        train_alike(replicated, those, optimizer, range(3, 6))
    assert state(restored, other) == state(variables, adam)


def test_parameters_set_between_steps_that_are_repeated_alike(replicated):
    """The slots come at a later step, and are not needed by the last ones."""
    results = []
    for is_sharded in (False, True):
        with replicated.scope():
            optimizer = SGD(0.1)
        variables, _ = make_floats(replicated, "momentum")
        for momentum in (0.0, 0.9, 0.5, 0.0):
            optimizer.sharded_slots = is_sharded and momentum > 0
            optimizer.momentum = momentum
            train_alike(replicated, variables, optimizer, range(2))
            results.append([as_bytes(each.numpy()) for each in variables.values()])
            replicated.extended.assert_replicas_agree(list(variables.values()))
    assert results[:4] == results[4:]


def test_gradients_in_memory_that_the_step_changes(strategy):
    # The last quarter of a variable is beyond the part that a middle rank updates of it.
    numbers = np.arange(2**20, dtype=np.float32) % 1000
    with strategy.scope():
        first, second = ms.Variable(numbers), ms.Variable(np.zeros(2**18, np.float32))
        momentum = SGD(1.0, momentum=0.5, sharded_slots=True)

    def step():
        view = first.storage[-(2**18) :]
        momentum.apply_gradients([(np.ones(2**20, np.float32), first), (view, second)])

    size, expected, velocity = strategy.num_replicas_in_sync, 0.0, 0.0
    for _ in range(3):  # in the first one, slots are made
        velocity = 0.5 * velocity - size * np.asarray(first.numpy())[-(2**18) :]
        expected = expected + velocity
        strategy.run(step)
        assert array_equal(second.numpy(), expected)
