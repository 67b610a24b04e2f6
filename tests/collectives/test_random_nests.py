"""Random nests of arrays of any dtype, shape and layout against NumPy, in every way to reduce."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat import nests
from tests.devices import assert_array_equal, implementation
from tests.helpers import result_of
from tests.random_arrays import OPS, assert_own, expected_of, specs

IMPLEMENTATIONS = [implementation(name) for name in ("AUTO", "MPI", "SHARED")]


def nests_of(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
            st.tuples(inner, inner),
        ),
        max_leaves=9,
    )


@st.composite
def calls(draw):
    op = draw(st.sampled_from(OPS))
    options = ms.CommunicationOptions(
        bytes_per_pack=draw(st.sampled_from([1, 5_000, 70_000, 2**25])),
        implementation=draw(st.sampled_from(IMPLEMENTATIONS)),
        deterministic=draw(st.integers(0, 3)) == 0,
    )
    return op, draw(nests_of(specs(op))), options, draw(st.sampled_from(["now", "later", "to one"]))


def build(nest, rank):
    """Return the arrays that `rank` brings for a nest of specifications."""
    leaves, structure = nests.flatten(nest)
    arrays = [spec.build(number, rank) for number, spec in enumerate(leaves)]
    return nests.unflatten(structure, arrays)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_a_nest_is_reduced_leaf_by_leaf(strategy, rank, size, call):
    op, nest, options, when = call
    rows = [nests.flatten(build(nest, each))[0] for each in range(size)]
    own = build(nest, rank)
    inputs = nests.flatten(own)[0]
    root = size - 1

    def reduce(replica):
        if when == "now":
            return replica.all_reduce(op, own, options)
        if when == "to one":
            device = f"/job:worker/task:{root}/device:CPU:0"
            return replica.merge_call(
                lambda strategy: strategy.extended.reduce_to(op, own, device, options)
            )
        handle = replica.start_all_reduce(op, own, options)
        for array in inputs:
            if array.flags.writeable:
                array[...] = 1
        return handle.wait()

    result = result_of(strategy, lambda: reduce(ms.get_replica_context()))
    if when == "to one" and rank != root:
        assert result is None
        return
    assert nests.flatten(result)[1] == nests.flatten(own)[1]
    results = nests.flatten(result)[0]
    for number, reduced in enumerate(results):
        expected = expected_of(op, [row[number] for row in rows])
        assert (reduced.dtype, reduced.shape) == (expected.dtype, expected.shape)
        assert_array_equal(reduced, expected)
        if when != "later":
            assert_array_equal(inputs[number], rows[rank][number])
    assert_own(results, inputs)
