"""Patterns of names: natural order, matches, links that lead nowhere or in circles."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, Dataset, Field
from mpistrat.data.hdf5.fields import natural_key
from mpistrat.data.hdf5.listing import Listing
from mpistrat.errors import DataError


def compare(a, b):
    """Return whether `a` comes before `b`, character by character and number by number."""
    while a and b:
        if a[0] in DIGITS and b[0] in DIGITS:
            m, n = leading(a), leading(b)
            if m != n:
                return int(m) < int(n) if int(m) != int(n) else m < n
            a, b = a[len(m) :], b[len(n) :]
        elif a[0] != b[0]:
            return a[0] < b[0]
        else:
            a, b = a[1:], b[1:]
    return len(a) < len(b)


DIGITS = "0123456789"


def leading(text):
    return text[: next((n for n, c in enumerate(text) if c not in DIGITS), len(text))]


NAMES = st.text(st.sampled_from("0129a_é²*-"), max_size=6)


@given(NAMES, NAMES)
def test_natural_order(a, b):
    assert (natural_key(a) < natural_key(b)) == compare(a, b)


def test_numbers_count_and_equal_ones_go_by_code_point():
    names = ["demo_10", "demo_2", "demo_01", "demo_1", "demo_", "demo_1a", "demo_1_2", "a10", "a9"]
    expected = ["a9", "a10", "demo_", "demo_01", "demo_1", "demo_1_2", "demo_1a", "demo_2"]
    assert sorted(names, key=natural_key) == [*expected, "demo_10"]


def write(path, names, member="x", **options):
    with h5py.File(path, "w", **options) as file:
        for number, name in enumerate(names):
            group = file.create_group(f"data/{name}")
            group[member] = np.full((2, 3), number, np.float32)
            group.attrs["label"] = number
            group.attrs["text"] = f"é{number}"
    return path


def first_use_raises(*args, match, **kwargs):
    dataset = Dataset.from_hdf5(*args, **kwargs)
    for use in (list, Dataset.cardinality, lambda d: d.element_spec):
        with pytest.raises(DataError, match=match):
            use(dataset)


NATURAL = ["*", "a b", "demo_01", "demo_1", "demo_2", "demo_10", "x*y", "é1", "é2"]


@pytest.mark.parametrize("track_order", [False, True])
def test_each_match_is_an_example_in_natural_order(tmp_path, track_order):
    names = [*NATURAL[::2], *NATURAL[1::2]]
    path = write(tmp_path / "data.h5", names, track_order=track_order)
    fields = (
        "data/*/x",
        Field("data/*", attribute="label"),
        Field("data/*", attribute="text"),
    )
    dataset = Dataset.from_hdf5(path, fields)
    assert dataset.element_spec[0] == ArraySpec((2, 3), np.float32)
    assert dataset.element_spec[1] == ArraySpec((), np.int64)
    assert dataset.element_spec[2].dtype.kind == "U"
    expected = [names.index(name) for name in NATURAL]
    for x, label, text in dataset.batch(4):
        part, expected = expected[: len(x)], expected[len(x) :]
        assert (x == np.array(part)[:, None, None]).all()
        assert label.tolist() == part
        assert text.tolist() == [f"é{number}" for number in part]
    assert not expected


def test_stars_in_several_names_and_within_one(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for a in (2, 10, 1):
            for b in (3, 20):
                file[f"run{a}/obs/t{b}_raw/v"] = 100 * a + b
            file[f"run{a}/obs/other/v"] = -1
        file["run3"] = 5  # no group
        file.create_group("run4/obs")
    read = list(Dataset.from_hdf5(tmp_path / "data.h5", "/run*/obs//t*_r*w/v"))
    assert read == [103, 120, 203, 220, 1003, 1020]


def test_several_files_come_one_after_the_other(tmp_path):
    write(tmp_path / "b.h5", ["demo_1"])
    write(tmp_path / "a.h5", ["demo_9", "demo_3"])
    read = Dataset.from_hdf5(str(tmp_path / "*.h5"), Field("data/demo_*", attribute="label"))
    assert [int(label) for label in read] == [1, 0, 0]
    write(tmp_path / "c.h5", ["other"])
    first_use_raises(
        str(tmp_path / "*.h5"), "data/demo_*/x", match=r"c\.h5 matches nothing.*'other'"
    )


def test_what_does_not_match_is_named(tmp_path):
    path = write(tmp_path / "data.h5", [f"demo_{n}" for n in range(12)])
    first_use_raises(path, "data/dem_*/x", match=r"'data/dem_\*/x'.*/data has 'demo_0', 'demo_1'")
    first_use_raises(path, "data/demo_*/y", match="/data/demo_0 has 'x'")
    first_use_raises(path, "data/demo_*", match="matches groups, such as 'demo_0'.*attribute")
    no_attribute = Field("data/demo_*", attribute="gone")
    first_use_raises(path, no_attribute, match="'demo_0' has no attribute 'gone'")
    with h5py.File(path, "a") as file:
        del file["data/demo_7/x"]
        del file["data/demo_3"].attrs["text"]
    both = ("data/demo_*/x", Field("data/demo_*", attribute="label"))
    first_use_raises(path, both, match=r"'demo_7'.* is missing in 'data/demo_\*/x'")
    first_use_raises(path, Field("data/demo_*", attribute="text"), match="'demo_3' has no attr")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 3), np.float64), r"'demo_0' of dtype float32 and 'demo_5' of dtype float64"),
        (np.zeros(3, np.float32), r"'demo_0' with 2 dimension.* 'demo_5' with 1"),
        (h5py.Empty("f4"), "'demo_5' is empty"),
    ],
)
def test_matches_of_other_dtypes_and_dimensions(tmp_path, value, message):
    path = write(tmp_path / "data.h5", [f"demo_{n}" for n in range(6)])
    with h5py.File(path, "a") as file:
        del file["data/demo_5/x"]
        file["data/demo_5/x"] = value
    first_use_raises(path, "data/demo_*/x", match=message)


def test_byte_orders_and_widths_of_strings_may_differ(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for number, (kind, text) in enumerate((("<f4", b"a"), (">f4", b"bcd"))):
            file[f"g{number}/x"] = np.arange(3, dtype=kind)
            file[f"g{number}"].attrs["name"] = np.bytes_(text)
    fields = ("g*/x", Field("g*", attribute="name"))
    ((x, name),) = Dataset.from_hdf5(tmp_path / "data.h5", fields).batch(2)
    assert x.dtype == np.float32
    assert x.tolist() == [[0, 1, 2]] * 2
    assert name.tolist() == [b"a", b"bcd"]


def test_links_lead_nowhere_in_circles_and_to_other_files(tmp_path):
    path = write(tmp_path / "data.h5", ["demo_1", "demo_2"])
    write(tmp_path / "far.h5", ["demo_8", "demo_9"])
    with h5py.File(path, "a") as file:
        file["data/demo_0"] = file["data"]  # hard, soft and external circles
        file["data/demo_3"] = h5py.SoftLink("/data")
        file["data/demo_4"] = h5py.ExternalLink("data.h5", "/data")
        file["data/demo_10"] = h5py.ExternalLink("far.h5", "/data/demo_9")
        file["data/demo_5"] = h5py.SoftLink("/data/demo_2")
    read = Dataset.from_hdf5(path, "data/demo_*/x")
    assert [int(x[0, 0]) for x in read] == [0, 1, 1, 1]
    read = Dataset.from_hdf5(path, "data/demo_*/demo_*/demo_2/x")
    assert {int(x[0, 0]) for x in read} == {1}
    for number, target in enumerate(("/nowhere", "/data/self7")):
        with h5py.File(path, "a") as file:
            file[f"data/self{number + 6}"] = h5py.SoftLink(target)
        first_use_raises(path, "data/self*/x", match=f"'self{number + 6}/x', a broken link")
        with h5py.File(path, "a") as file:
            del file[f"data/self{number + 6}"]
    (tmp_path / "far.h5").unlink()
    first_use_raises(path, "data/demo_*/x", match="a broken link")


@given(
    st.lists(st.text(max_size=5), unique=True, max_size=5),
    st.lists(st.integers(-1, 2**40), min_size=5, max_size=5),
)
def test_a_listing_survives_json(names, numbers):
    shapes = np.arange(2 * len(names)).reshape(-1, 2)
    offsets = np.array(numbers[: len(names)], np.int64)
    listing = Listing(tuple(names), ("a", "*"), ("m",), shapes, offsets, 8, ("x",))
    other = Listing.from_json(listing.to_json())
    assert other.names == listing.names
    assert other.digest == listing.digest
    assert other.offsets.tolist() == offsets.tolist()


def test_many_groups(tmp_path):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for number in range(3000):
            file.create_dataset(f"g/{number}", data=number)
    dataset = Dataset.from_hdf5(path, "g/*")
    assert np.concatenate(list(dataset.batch(700))).tolist() == list(range(3000))
    assert sorted(np.concatenate(list(dataset.shuffle(0).batch(64)))) == list(range(3000))


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        ((3,), {}, TypeError),
        (("",), {}, ValueError),
        (("a\0",), {}, ValueError),
        (("a",), {"attribute": ""}, ValueError),
        (("a",), {"attribute": 3}, TypeError),
        (("a",), {"axis": 1.5}, TypeError),
        (("a",), {"axis": True}, TypeError),
        (("a*",), {"axis": 1}, ValueError),
        (("a",), {"attribute": "b", "axis": -1}, ValueError),
        (("a", "b"), {}, TypeError),
    ],
)
def test_arguments_that_are_no_field(args, options, error):
    with pytest.raises(error):
        Field(*args, **options)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_strings_of_several_widths(tmp_path, shape):
    # The first match lies in one piece, and is narrower than what all are widened to.
    paths, expected = [tmp_path / f"{number}.h5" for number in range(3)], []
    for path, widths in zip(paths, [(1, 7, 3), (2, 2, 2), (9, 9, 9)], strict=True):
        with h5py.File(path, "w") as file:
            for number, width in enumerate(widths):
                file[f"g/{number}"] = np.full(shape, b"abcdefghi"[:width])
                expected.append(np.full(shape, b"abcdefghi"[:width], "S9"))
    texts = Dataset.from_hdf5(paths, "g/*")
    assert texts.element_spec == ArraySpec(shape, "S9")
    np.testing.assert_array_equal(list(texts), expected)
    np.testing.assert_array_equal(next(iter(texts.batch(9))), expected)
