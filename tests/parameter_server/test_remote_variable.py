"""Remote variables: reads, writes and rows, plain and in parts, on the chief and on servers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.parameter_server import store
from mpistrat.parameter_server.store import Operation, ParameterStore, Request, slot_key

A = ms.VariableAggregation


def on_chief(body, setup, parts=1):
    """Make a strategy with as many servers as there can be, and run `body` on its chief."""
    world = ms.MPIStrategy()
    num_ps = max(0, world.size - 2)
    world.close()
    partitioner = ms.partitioners.FixedShardsPartitioner(parts)
    strategy = ms.ParameterServerStrategy(num_ps, partitioner)
    with strategy.scope():
        made = setup()
    if strategy.rank:
        strategy.serve()
        return
    try:
        body(*made)
    finally:
        strategy.close()


SHAPES = [(), (0, 3), (1,), (5, 2), (3, 2, 2)]
DTYPES = ["f8", "f4", "f2", "c16", "i4", "u1", "?"]


@pytest.mark.parametrize("parts", [1, 3])
def test_shapes_and_dtypes(parts):
    values = [
        (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
        for shape in SHAPES
        for dtype in DTYPES
    ]

    def body(*variables):
        for value, variable in zip(values, variables, strict=True):
            assert (variable.dtype, variable.shape) == (value.dtype, value.shape)
            assert variable.numpy().tobytes() == value.tobytes()
            variable.assign(np.ones_like(value), read_value=False)
            assert variable.numpy().all()
            assert variable.value().shape == value.shape
            assert not variable.value().flags.writeable
            assert variable.numpy().flags.writeable

    on_chief(body, lambda: list(map(ms.Variable, values)), parts)


@pytest.mark.parametrize("parts", [1, 3])
def test_writes(parts):
    def body(variable):
        after = variable.assign_add(np.ones((5, 2)))
        assert (after is variable) == (parts > 1)
        assert (variable.assign_sub(2 * np.ones((5, 2)), read_value=False)) is None
        assert (variable.numpy() == -1).all()
        for wrong in (np.ones(5), np.ones((6, 2)), np.ones((4, 2)), 3.0):
            with pytest.raises(ValueError, match="shape"):
                variable.assign(wrong)
        with pytest.raises(TypeError):
            variable.assign(np.ones((5, 2), complex))
        other = variable * 2 + 1
        assert (np.asarray(other) == -1).all()
        variable.assign(variable)
        assert (variable.numpy() == -1).all()

    on_chief(body, lambda: (ms.Variable(np.zeros((5, 2))),), parts)


WRITES = ("add", "sub", "mul", "div", "min", "max", "update")


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("aggregation", [A.NONE, A.SUM], ids=str)
def test_scatters_equal_those_of_a_plain_variable(parts, aggregation):
    start = np.arange(1.0, 11.0).reshape(5, 2)
    slices = ms.IndexedSlices(np.array([[2.0, 4.0], [8.0, 0.5], [1.0, 3.0]]), [4, 0, 4])

    def body(variable):
        for name in WRITES:
            variable.assign(start, read_value=False)
            getattr(variable, f"scatter_{name}")(slices)
            plain = ms.Variable(start)
            getattr(plain, f"scatter_{name}")(slices)
            assert variable.numpy().tolist() == plain.numpy().tolist(), name
        for wrong in (5, -1):
            with pytest.raises(IndexError):
                variable.scatter_add(ms.IndexedSlices(np.ones((1, 2)), [wrong]))
        batch = ms.IndexedSlices(np.full((5, 1), 7.0), np.ones((5, 1), int))
        variable.batch_scatter_update(batch)
        assert variable.numpy()[:, 1].tolist() == [7.0] * 5

    on_chief(body, lambda: (ms.Variable(start, aggregation=aggregation),), parts)


@pytest.mark.parametrize("parts", [1, 3])
def test_reads_of_rows(parts):
    start = np.arange(14.0).reshape(7, 2)

    def body(variable):
        assert variable.lookup([6, 0, 3, 6]).tolist() == start[[6, 0, 3, 6]].tolist()
        assert variable.lookup([[1], [2]]).shape == (2, 1, 2)
        assert variable.lookup([]).shape == (0, 2)
        for wrong in ([7], [-1]):
            with pytest.raises(IndexError):
                variable.lookup(wrong)
        for index in (0, -1, slice(1, 4), slice(None, None, -2), (slice(1, 5), 1), ..., [2, 0]):
            assert variable[index].tolist() == start[index].tolist(), index
        with pytest.raises(IndexError):
            variable[7]
        with pytest.raises(NotImplementedError, match=r"lookup\(ids\), or all of them with value"):
            _ = variable.part
        with pytest.raises(NotImplementedError, match="lookup"):
            _ = variable.storage

    on_chief(body, lambda: (ms.Variable(start),), parts)


def test_sync_on_read_variables_are_plain():
    def body(variable):
        assert variable.trainable is False
        variable.assign_add(2.0)
        assert variable.numpy() == 3.0

    on_read = ms.VariableSynchronization.ON_READ
    on_chief(body, lambda: (ms.Variable(1.0, synchronization=on_read, aggregation=A.SUM),))


def test_a_value_too_large_to_gather(monkeypatch):
    monkeypatch.setenv("MPISTRAT_GATHER_LIMIT", "100")

    def body(variable):
        with pytest.raises(ValueError, match="MPISTRAT_GATHER_LIMIT"):
            variable.value()
        assert variable.lookup([3]).shape == (1, 10)

    on_chief(body, lambda: (ms.Variable(np.zeros((10, 10))),), 2)


@given(
    st.sampled_from(list(Operation)),
    st.integers(0, 2**62),
    st.sampled_from(["f4", "f8", "i8", "c16", "?"]),
    st.integers(0, 255),
    st.integers(0, 2**40),
    st.binary(max_size=20),
)
def test_requests_travel_whole(operation, key, dtype, how, start, extra):
    request = Request(operation, key, np.dtype(dtype), (), how, start, -1, extra)
    assert Request.parse(request.body(), ()) == request


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 7))
def test_keys_of_slots_are_their_own(part, optimizer, slot):
    key = slot_key(part, optimizer, slot)
    assert store._part_of(key) == part
    assert store._optimizer_of(key) == optimizer
    assert store._optimizer_of(part) == -1


class Slow:
    """A message that is still being sent."""

    is_over = False

    def is_done(self):
        return self.is_over


def test_a_write_does_not_change_what_is_being_read():
    store, dtype = ParameterStore(), np.dtype("f8")
    store.shapes[0] = (3,)
    store.add(0, np.zeros(3))
    sending = Slow()
    for how in (0, 1):  # assign, assign_add
        reply = store.answer(Request(Operation.READ, 0, dtype))
        store.lend(reply.lent, sending)
        seen = reply.buffers[0].copy()
        one = np.full(3, 5.0).view(np.uint8)
        store.answer(Request(Operation.WRITE, 0, dtype, [one], how))
        assert (reply.buffers[0] == seen).all()
    sending.is_over = True
    assert store.answer(Request(Operation.READ, 0, dtype)).buffers[0].tolist() == [10.0] * 3
    assert store.num_bytes() == 24
