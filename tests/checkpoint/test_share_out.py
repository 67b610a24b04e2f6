"""Which rank reads what of a file that several read together."""

from hypothesis import example, given
from hypothesis import strategies as st

from mpistrat.checkpoint.raw_io import share_out


@given(
    st.dictionaries(st.text(), st.integers(0, 2**40)),
    st.sets(st.integers(0, 100), min_size=1).map(sorted),
)
@example(dict.fromkeys("abcdefghi", 5), [0, 2, 3])
def test_each_rank_gets_about_as_many_bytes(sizes, ranks):
    owners = share_out(sizes, ranks)
    assert owners.keys() == sizes.keys()
    assert set(owners.values()) <= set(ranks)
    loads = [sum(sizes[each] for each in sizes if owners[each] == rank) for rank in ranks]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
