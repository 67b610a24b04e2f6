import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.comm import mpi_transport
from mpistrat.comm.mpi_transport import in_parts, plan_windows


@pytest.fixture(scope="module", params=[1, 10, 64, 2**28], autouse=True)
def limit(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_transport, "_PART_BYTES", request.param)
        yield request.param


@given(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(["u1", "f4", "c16"]))
def test_parts_are_short_views_that_cover_all(limit, shape, dtype):
    buffer = np.zeros(shape, dtype)
    pieces = in_parts(buffer)
    assert sum(piece.size for piece in pieces) == buffer.size
    assert len(pieces) == 1 or all(0 < each.nbytes <= max(limit, each.itemsize) for each in pieces)
    flat = buffer.reshape(-1)
    flat[...] = np.arange(flat.size) % 100
    assert np.concatenate([piece.reshape(-1) for piece in pieces]).tolist() == flat.tolist()
    assert all(np.shares_memory(piece, buffer) for piece in pieces if piece.size)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.sampled_from([1, 8]))
def test_windows_are_small_and_cover_all(limit, counts, itemsize):
    windows = plan_windows(counts, itemsize)
    for rank, count in enumerate(counts):
        own = [range(start, start + lengths[rank]) for start, lengths in windows]
        assert [i for each in own for i in each] == list(range(count))
    for _, lengths in windows:
        assert sum(lengths) * itemsize <= max(limit, len(counts) * itemsize)
    assert windows or not any(counts)
