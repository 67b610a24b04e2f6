"""The shapes of new chunks, and the sizes that people write."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data.compression import COMPRESSIONS, compression
from mpistrat.data.rechunk_plan import chunk_shape, rows_per_chunk
from mpistrat.spelling import parse_size

LENGTHS = st.integers(1, 300)


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 16), st.integers(1, 10_000))
def test_chunks_are_as_large_as_asked(shape, item_bytes, chunk_bytes):
    row_bytes = item_bytes * math.prod(shape[1:])
    rows = rows_per_chunk({"x": row_bytes}, shape[0], chunk_bytes)["x"]
    chunk = chunk_shape(shape, item_bytes, rows, chunk_bytes)
    assert len(chunk) == len(shape)
    assert all(1 <= part <= whole for part, whole in zip(chunk, shape, strict=True))
    size = item_bytes * math.prod(chunk)
    assert size <= max(chunk_bytes, 4096, item_bytes)
    if row_bytes <= chunk_bytes:
        assert chunk[1:] == tuple(shape[1:])
        assert chunk[0] == shape[0] or size > max(chunk_bytes - row_bytes, 2048)
    elif row_bytes > 4096:
        assert chunk[0] == 1


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=5), LENGTHS, st.integers(1, 2**20))
def test_fields_that_are_read_together_have_chunks_that_lie_alike(row_bytes, num_rows, size):
    rows = rows_per_chunk({str(n): each for n, each in enumerate(row_bytes)}, num_rows, size)
    fewest = min(rows.values())
    assert fewest <= max(size // max(row_bytes), 1, 4096 // max(row_bytes))
    assert all(each % fewest == 0 or each == num_rows for each in rows.values())


def test_sizes():
    sizes = {"4096": 4096, "256KiB": 2**18, "1m": 2**20, "1.5 kB": 1536, "2G": 2**31, "7b": 7}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "KiB", "-1", "1e3", "3X", "0x10"):
        with pytest.raises(ValueError, match="256KiB"):
            parse_size(text)


def test_compressions():
    assert {compression(name).name for name in COMPRESSIONS} == set(COMPRESSIONS)
    assert compression("gzip", 9).filters == ((1, (9,)),)
    assert compression("gzip").is_shuffled
    assert not compression("gzip", shuffle=False).is_shuffled
    for name, level in (("gzip", 10), ("lzf", 1), ("none", 1), ("keep", 1), ("zstd", 0)):
        with pytest.raises(ValueError, match=f"{name} has .*level {level}"):
            compression(name, level)
    with pytest.raises(ValueError, match="no compression 'rar'"):
        compression("rar")
