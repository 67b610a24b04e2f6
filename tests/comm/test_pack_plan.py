from hypothesis import given
from hypothesis import strategies as st

from mpistrat.comm.pack_plan import plan_packs


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fd"))), st.integers(1, 150))
def test_packs(arrays, limit):
    sizes, keys = [size for size, _ in arrays], [key for _, key in arrays]
    packs = plan_packs(sizes, keys, limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(arrays)))
    for pack in packs:
        assert len({keys[i] for i in pack}) == 1
        assert len(pack) == 1 or sum(sizes[i] for i in pack) <= limit
        assert pack == sorted(pack)


def test_a_thousand_small_arrays_make_one_message():
    assert len(plan_packs([400] * 1000, ["f"] * 1000, 2**20)) == 1
