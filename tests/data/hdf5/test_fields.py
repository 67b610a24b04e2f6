"""Fields of all forms: attributes, members, axes, rows of any length, text; refused types."""

import warnings

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, Dataset, Field
from mpistrat.errors import DataError
from tests.data.hdf5.test_patterns import first_use_raises

ROW = np.dtype(
    [
        ("t", "f8"),
        ("q", ">f4"),
        ("name", "S8"),
        ("hit", [("x", "i2"), ("where", "f4", (2,)), ("good", "?")]),
        ("note", h5py.string_dtype()),
        ("trace", h5py.vlen_dtype("f4")),
    ]
)
FIXED = np.dtype([(name, ROW[name]) for name in ("t", "q", "name", "hit")])


def rows_of(dtype, n):
    rows = np.zeros(n, dtype)
    rows["t"], rows["q"] = np.arange(n) / 4, np.arange(n) - 3
    rows["name"] = [f"n{k}".encode() for k in range(n)]
    rows["hit"]["x"], rows["hit"]["good"] = np.arange(n), np.arange(n) % 2
    rows["hit"]["where"] = np.arange(2 * n).reshape(n, 2)
    if "note" in dtype.names:
        rows["note"] = ["ä" * k for k in range(n)]
        for k in range(n):
            rows["trace"][k] = np.arange(k, dtype="f4")
    return rows


def same(got, expected):
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[k], expected[k]) for k in expected)
    return np.array_equal(got, expected)


def example_of(row):
    """Return a compound row as the nest that an example is."""
    if row.dtype.names:
        return {name: example_of(row[name]) for name in row.dtype.names}
    return row


KINDS = {
    "contiguous": {},
    "chunks": {"chunks": (5,)},
    "gzip": {"chunks": (5,), "compression": "gzip", "shuffle": True},
}


@pytest.mark.parametrize("cache_bytes", [0, 2**23])
@pytest.mark.parametrize("kind", KINDS)
def test_members_of_compound_rows(tmp_path, monkeypatch, kind, cache_bytes):
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", cache_bytes)
    rows = rows_of(FIXED, 23)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("a/events", data=rows, **KINDS[kind])
    source = Dataset.from_hdf5(tmp_path / "data.h5", "a/events")
    assert source.element_spec["hit"]["where"] == ArraySpec((2,), "f4")
    for example, row in zip(source, rows, strict=True):
        assert example["q"].dtype == np.float32
        assert same(example, {**{n: row[n] for n in ("t", "q", "name")}, "hit": HIT(row)})
    fields = {"x": "a/events/hit/x", "t": "a/events/t", "hit": "a/events/hit"}
    for dataset in (
        Dataset.from_hdf5(tmp_path / "data.h5", fields),
        Dataset.from_hdf5(tmp_path / "data.h5", fields).shuffle(1),
    ):
        seen = []
        for batch in dataset.batch(7):
            own = batch["x"]
            assert np.array_equal(batch["t"], rows["t"][own])
            assert np.array_equal(batch["hit"]["where"], rows["hit"]["where"][own])
            assert batch["hit"]["good"].dtype == np.bool_
            assert batch["t"].flags.c_contiguous
            seen += own.tolist()
        assert sorted(seen) == list(range(23))


def HIT(row):  # noqa: N802
    return {name: row["hit"][name] for name in row["hit"].dtype.names}


def test_members_of_their_own_length_and_text(tmp_path):
    rows = rows_of(ROW, 9)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("events", data=rows, chunks=(4,))
    source = Dataset.from_hdf5(tmp_path / "data.h5", "events")
    spec = source.element_spec
    assert spec["trace"] == ArraySpec((None,), "f4")
    assert spec["note"].dtype == np.dtype("U")
    assert len(list(source)) == 9
    for k, example in enumerate(source):
        assert example["note"] == "ä" * k
        assert example["trace"].tolist() == list(range(k))
        assert example["trace"].dtype == np.float32
        assert example["hit"]["x"] == k
    notes, x = next(
        iter(Dataset.from_hdf5(tmp_path / "data.h5", ("events/note", "events/hit/x")).batch(9))
    )
    assert notes.tolist() == ["ä" * k for k in range(9)]
    assert x.tolist() == list(range(9))


@pytest.mark.parametrize("chunks", [None, True, (2, 3, 4)])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_another_axis_counts_examples(tmp_path, monkeypatch, axis, chunks):
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    whole = np.arange(5 * 7 * 11, dtype=">i4").reshape(5, 7, 11)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        compression = {"compression": "gzip"} if chunks else {}
        file.create_dataset("x", data=whole, chunks=chunks, **compression)
    source = Dataset.from_hdf5(tmp_path / "data.h5", Field("x", axis=axis))
    expected = np.moveaxis(whole, axis, 0)
    assert np.array_equal(list(source), expected)
    batches = np.concatenate(list(source.shuffle(0).batch(3)))
    assert sorted(map(bytes, batches)) == sorted(bytes(each.astype("i4")) for each in expected)


def test_an_axis_that_is_not_there(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros((3, 4))
    first_use_raises(tmp_path / "data.h5", Field("x", axis=2), match=r"\(3, 4\).*axis 2.*\[-2, 1\]")


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@settings(max_examples=25)
@given(
    lengths=LENGTHS,
    chunk=st.sampled_from([None, 1, 4]),
    kind=st.sampled_from(["u1", "f4", "i8"]),
)
def test_rows_of_their_own_length(lengths, chunk, kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "data.h5"
    rows = [np.arange(n, dtype=kind) + k for k, n in enumerate(lengths)]
    with h5py.File(path, "w") as file:
        chunks = (min(chunk, len(rows)),) if chunk else None
        data = file.create_dataset("v", (len(rows),), h5py.vlen_dtype(kind), chunks=chunks)
        for k, row in enumerate(rows):
            data[k] = row
        file["k"] = np.arange(len(rows))
        file["text"] = ["é" * n for n in lengths]
    source = Dataset.from_hdf5(path, ("v", "k", "text"))
    assert source.element_spec[0] == ArraySpec((None,), np.dtype(kind).newbyteorder("="))
    for dataset in (source, source.shuffle(3)):
        seen = []
        for v, k, text in dataset:
            assert v.dtype == np.dtype(kind).newbyteorder("=")
            assert v.tolist() == rows[k].tolist()
            assert text == "é" * lengths[k]
            seen.append(int(k))
        assert sorted(seen) == list(range(len(rows)))
    texts = np.concatenate(list(Dataset.from_hdf5(path, "text").batch(4)))
    assert texts.dtype == f"<U{max(1, *lengths)}"


def test_rows_that_were_never_written_and_text_of_several_dimensions(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("v", (3,), h5py.vlen_dtype("i4"))
        file.create_dataset("t", (3,), h5py.string_dtype())
        table = file.create_dataset("table", (2, 3), h5py.string_dtype())
        table[...] = [["a", "bb", "c"], ["d", "e", "ffff"]]
        file["bad"] = np.array([b"ok", b"\xff\xfe"], h5py.string_dtype())
    path = tmp_path / "data.h5"
    for v, t in Dataset.from_hdf5(path, ("v", "t")):
        assert v.shape == (0,)
        assert t == ""
    (rows,) = Dataset.from_hdf5(path, "table").batch(2)
    assert rows.tolist() == [["a", "bb", "c"], ["d", "e", "ffff"]]
    columns = Dataset.from_hdf5(path, Field("table", axis=1))
    assert [each.tolist() for each in columns] == [["a", "d"], ["bb", "e"], ["c", "ffff"]]
    with pytest.raises(DataError, match=r"Row 1 of the field 'bad' of .*data\.h5 is not UTF-8"):
        list(Dataset.from_hdf5(path, "bad"))


def test_matches_that_differ_in_shape_and_layout(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for k in range(12):
            options = {"chunks": (1, 2), "compression": "gzip"} if k % 3 == 1 else {}
            file.create_dataset(f"g/{k}/x", data=np.full((k % 4 + 1, 2), k, "f4"), **options)
            file[f"g/{k}/v"] = np.full(k, k)
            file[f"g/{k}/e"] = rows_of(FIXED, k)
            file[f"g/{k}"].attrs["pair"] = np.arange(k, k + 2)
            file[f"g/{k}"].attrs["list"] = np.arange(k)
            file[f"g/{k}"].attrs["words"] = ["a" * k, "b"]
        file["label"] = np.arange(12)
    fields = {
        "x": "g/*/x",
        "v": "g/*/v",
        "q": "g/*/e/q",
        "pair": Field("g/*", attribute="pair"),
        "list": Field("g/*", attribute="list"),
        "words": Field("g/*", attribute="words"),
        "label": "label",
    }
    source = Dataset.from_hdf5(tmp_path / "data.h5", fields)
    spec = source.element_spec
    assert spec["x"] == ArraySpec((None, 2), "f4")
    assert spec["v"] == ArraySpec((None,), "i8")
    assert spec["pair"] == ArraySpec((2,), "i8")
    for dataset in (source, source.shuffle(0), source.shuffle(0)):
        seen = []
        for example in dataset:
            k = int(example["label"])
            assert example["x"].tolist() == np.full((k % 4 + 1, 2), k).tolist()
            assert example["v"].tolist() == [k] * k
            assert example["q"].tolist() == [n - 3 for n in range(k)]
            assert example["pair"].tolist() == [k, k + 1]
            assert example["list"].tolist() == list(range(k))
            assert example["words"].tolist() == ["a" * k, "b"]
            seen.append(k)
        assert sorted(seen) == list(range(12))


def test_one_attribute_is_the_same_in_every_example(tmp_path):
    for name, unit in (("a.h5", "mV"), ("b.h5", "volt")):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.arange(3)
            file["x"].attrs["unit"] = unit
            file["x"].attrs["shape"] = [1, 2]
            file.attrs["run"] = len(unit)
    fields = ("x", Field("x", attribute="unit"), Field("/", attribute="run"))
    read = [tuple(map(str, each)) for each in Dataset.from_hdf5(str(tmp_path / "*.h5"), fields)]
    assert read[0] == ("0", "mV", "2")
    assert read[5] == ("2", "volt", "4")
    alone = Dataset.from_hdf5(tmp_path / "a.h5", Field("x", attribute="shape"))
    assert [each.tolist() for each in alone] == [[1, 2]] * 3
    first_use_raises(
        tmp_path / "a.h5", Field("/", attribute="run"), match="All fields of .* are attributes"
    )
    gone = ("x", Field("x", attribute="gone"))
    first_use_raises(tmp_path / "a.h5", gone, match="no attribute 'gone'. It has 'shape', 'unit'")


def refused(file):
    file["good/x"] = np.arange(3)
    file["ref"] = np.array([file["good"].ref] * 3, h5py.ref_dtype)
    file.create_dataset("region", (3,), h5py.regionref_dtype)
    file["opaque"] = np.array([b"abc"] * 3, "V3")
    inner = file.create_dataset("nested", (3,), h5py.vlen_dtype(h5py.string_dtype()))
    inner[0] = ["a"]
    file.create_dataset("grid", (3, 2), h5py.vlen_dtype("i4"))
    file.create_dataset("pairs", (3,), np.dtype([("x", "i4"), ("r", h5py.ref_dtype)]))


def test_types_that_are_refused_say_what_can_be_read(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        refused(file)
    for name, what in (
        ("ref", "references"),
        ("region", "references"),
        ("opaque", "opaque"),
        ("nested", "nested rows of variable length"),
        ("grid", "rows of variable length in 2 dimensions"),
        ("pairs", "references, in the member 'r'"),
        ("pairs/r", "references"),
    ):
        first_use_raises(path, name, match=rf"'{name}' of .*{what}.*can be read.*'good/x'")
        with pytest.raises(DataError) as caught:
            Dataset.from_hdf5(path, name).cardinality()
        assert caught.type is DataError  # the class that the manual names
    assert [int(x) for x in Dataset.from_hdf5(path, "pairs/x")] == [0, 0, 0]
    first_use_raises(path, "pairs/y", match="no member 'y'. Members there are 'x', 'r'")


def test_all_fields_but_those_that_cannot_be_read(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        refused(file)
        file["x*"], file["scalar"], file["nothing"] = np.arange(3), 3.0, h5py.Empty("f4")
        file["words"] = ["a", "bc", ""]
    dataset = Dataset.from_hdf5(path)
    with pytest.warns(UserWarning, match="from_hdf5") as caught:
        read = list(dataset)
    assert dataset.cardinality() == 3
    (warning,) = caught
    assert warning.filename == __file__
    for name in ("grid", "nested", "nothing", "opaque", "pairs/r", "ref", "region", "scalar"):
        assert f"{name!r}" in str(warning.message)
    assert [str(each["words"]) for each in read] == ["a", "bc", ""]
    assert read[2].keys() == {"x*", "words", "pairs"}
    assert read[2]["pairs"] == {"x": 0}
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file["scalar"] = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_use_raises(tmp_path / "none.h5", match="no dataset at its top level that can be rea")


def test_forms_of_fields_are_a_part_of_the_position(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros((4, 4))
        for name in "abcd":
            file[f"g/{name}"] = 0.0
    path = tmp_path / "data.h5"

    def position(fields):
        return Dataset.from_hdf5(path, fields).batch(2).state_dict()["order"]

    orders = [position(each) for each in ("x", Field("x", axis=1), "g/*")]
    assert len(set(orders)) == 3
    assert position(Field("x")) == orders[0]
    with h5py.File(path, "a") as file:
        file.move("g/d", "g/0")
    assert position("g/*") != orders[2]
    dataset = Dataset.from_hdf5(path, {"a": "g/*", "k": Field("x", axis=-1)}).batch(2)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    again = Dataset.from_hdf5(path, {"a": "g/*", "k": Field("x", axis=-1)}).batch(2)
    again.load_state_dict(state)
    assert len(list(again)) == 1
    assert repr(again).startswith("<Dataset from_hdf5(")
