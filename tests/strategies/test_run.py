import collections
import dataclasses

import numpy as np
import pytest

import mpistrat as ms

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object = None
    total: object = dataclasses.field(init=False, default=0)


def test_nests_keep_their_shape_and_numbers_become_per_replica(strategy, rank):
    def fn(nest, *, factor):
        assert nest["list"][0] == rank
        assert isinstance(nest["pair"], Pair)
        return {
            "list": [nest["list"][0] * factor, None, "text"],
            "point": Point(np.float32(1), (True,)),
            "pair": Pair(np.ones(2), {"deep": 2j}),
        }

    mine = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    argument = {"list": [mine], "pair": Pair(1)}
    result = strategy.run(fn, args=(argument,), kwargs={"factor": ms.Mirrored(3)})
    assert result["list"][0].values == (3 * rank,)
    assert result["list"][1:] == [None, "text"]
    assert isinstance(result["point"], Point)
    assert isinstance(result["point"].x, ms.PerReplica)
    assert result["point"].y[0].values == (True,)
    assert isinstance(result["pair"], Pair)
    assert isinstance(result["pair"].first, ms.PerReplica)
    assert result["pair"].second["deep"].values == (2j,)


def test_a_nest_from_a_function_is_a_nest_of_per_replica(strategy, rank):
    with strategy.scope():
        variable = ms.Variable(1.0)

    def value_fn(context):
        number = context.replica_id_in_sync_group
        point = Point(np.full(2, number), [number, "text", None])
        return {"point": point, "pair": Pair(variable, ms.Mirrored(3))}

    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert isinstance(values["point"], Point)
    assert isinstance(values["point"].x, ms.PerReplica)
    assert [each if each is None else each.values for each in values["point"].y] == [
        (rank,),
        ("text",),
        None,
    ]
    assert values["pair"].first is variable
    assert isinstance(values["pair"].second, ms.Mirrored)
    seen = strategy.run(lambda nest: nest["point"].x + nest["pair"].second, args=(values,))
    assert seen.values[0].tolist() == [rank + 3] * 2


def test_variables_and_slices_pass_as_one_value(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0)
    slices = ms.IndexedSlices(np.ones((2, 3)), np.array([0, 1]))

    def fn(given, rows):
        assert given is variable
        assert rows is slices
        return given, rows

    variable_back, slices_back = strategy.run(fn, args=[variable, slices])
    assert variable_back is variable
    assert slices_back.values == (slices,)


def test_local_results(strategy, rank):
    per_replica = strategy.run(lambda: {"a": rank, "b": [1.0]})
    assert strategy.experimental_local_results(per_replica) == ({"a": rank, "b": [1.0]},)
    assert strategy.experimental_local_results(4) == (4,)
    with strategy.scope():
        variable = ms.Variable(2.0)
    assert strategy.experimental_local_results(variable) == (2.0,)


def test_indexed_slices_need_one_index_a_row():
    with pytest.raises(ValueError, match="one index for each row"):
        ms.IndexedSlices(np.ones((2, 3)), np.array([0]))
