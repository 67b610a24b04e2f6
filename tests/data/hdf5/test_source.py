"""Reading HDF5 files: fields, several files, chunks, and what is refused."""

import threading

import h5py
import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset, Field
from mpistrat.data.hdf5 import open_files
from mpistrat.data.hdf5.open_files import OpenFiles
from mpistrat.data.hdf5.row_reader import Hdf5Reader
from mpistrat.errors import DataError
from tests.helpers import collect_in_a_thread, filenames


@pytest.fixture(autouse=True)
def tiny_chunks_are_for_threads_too(streamed, monkeypatch):
    monkeypatch.setattr("mpistrat.data.hdf5.row_reader._TINY_CHUNK_BYTES", 0)


def labels(dataset):
    return np.concatenate([batch["label"] for batch in dataset]).tolist()


@pytest.mark.parametrize("options", [{}, {"chunk": 7}, {"chunk": 7, "compression": "gzip"}])
def test_batches_of_a_file(numbered, options):
    dataset = Dataset.from_hdf5(numbered(50, **options)).batch(16)
    batches = list(dataset)
    assert [len(batch["image"]) for batch in batches] == [16, 16, 16, 2]
    assert batches[0]["image"].dtype == np.float32
    for batch in batches:
        assert (batch["image"] == batch["label"][:, None]).all()
    assert labels(dataset) == list(range(50))
    assert dataset.cardinality() == 4


def test_fields_give_the_structure(numbered):
    path = str(numbered(5))
    image, label = ArraySpec((3,), np.float32), ArraySpec((), np.int64)
    assert Dataset.from_hdf5(path).element_spec == {"image": image, "label": label}
    assert Dataset.from_hdf5(path, "label").element_spec == label
    assert Dataset.from_hdf5(path, ("label", "image")).element_spec == (label, image)
    assert Dataset.from_hdf5(path, {"x": "/image"}).element_spec == {"x": image}
    for x, y in Dataset.from_hdf5(path, ("image", "label")):
        assert x.tolist() == [y] * 3


def test_several_files_are_one_sequence(numbered, tmp_path):
    numbered(5, name="b.h5", first=10)
    numbered(0, name="c.h5", first=15)
    numbered(10, name="a.h5", chunk=4)
    numbered(3, name="d.h5", first=15, chunk=2)
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"))
    assert dataset.cardinality() == 18
    assert labels(dataset.batch(4)) == list(range(18))
    assert sorted(labels(dataset.shuffle(0).batch(4))) == list(range(18))
    listed = Dataset.from_hdf5([tmp_path / "b.h5", tmp_path / "a.h5"])
    assert labels(listed.batch(4)) == [*range(10, 15), *range(10)]


@pytest.mark.parametrize("chunk", [None, 1, 8, 1000])
def test_shuffled_files_lose_and_repeat_nothing(numbered, chunk):
    source = Dataset.from_hdf5(numbered(1000, chunk=chunk))
    for dataset in (
        source.shuffle(0).batch(32),
        source.shuffle(0, window=20).batch(1),
        source.map(lambda e: e).shuffle(0).batch(999),
        source.shuffle(0).shuffle(1).batch(32),
    ):
        for _ in range(2):
            order = labels(dataset)
            assert order != list(range(1000))
            assert sorted(order) == list(range(1000))
    assert sorted(labels(source.skip(100).take(500).shuffle(5).batch(32))) == list(range(100, 600))
    assert sorted(labels(source.shard(3, 1).shuffle(5).batch(32))) == list(range(1, 1000, 3))


def test_a_shuffled_file_has_no_visible_order(numbered):
    dataset = Dataset.from_hdf5(numbered(20_000, chunk=64)).shuffle(0).batch(256)
    order = np.array(labels(dataset))
    assert abs(np.corrcoef(np.arange(20_000), order)[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).mean() < 0.01


def count_chunk_reads(monkeypatch):
    reads = []
    decode = Hdf5Reader._decode

    def counting(self, field, chunks):
        for chunk, _ in chunks:
            file, start, _ = self._plans[field].row_range(chunk)
            if self._catalog.files[file].layouts[field].is_chunked:
                reads.append((file, field, start))
        return decode(self, field, chunks)

    monkeypatch.setattr(Hdf5Reader, "_decode", counting)
    return reads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_shuffled_pass_reads_each_chunk_about_once_over_all_ranks(
    numbered, all_ranks, monkeypatch, size
):
    path = numbered(20_000, chunk=64, compression="gzip")
    reads = count_chunk_reads(monkeypatch)
    for batches in all_ranks(Dataset.from_hdf5(path).shuffle(0).batch(256), size):
        assert sum(1 for _ in batches) == 79
    num_chunks = -(-20_000 // 64)
    assert len(set(reads)) == num_chunks
    assert len(reads) <= 1.2 * num_chunks


@pytest.mark.parametrize(("num_examples", "batch_size"), [(1797, 64), (1437, 100)])
@pytest.mark.parametrize(("size", "most"), [(1, 1.0), (2, 1.1), (3, 2.0), (4, 1.5)])
def test_few_chunks_are_shared_by_few_ranks(
    numbered, all_ranks, monkeypatch, num_examples, batch_size, size, most
):
    path = numbered(num_examples, chunk=128)
    reads = count_chunk_reads(monkeypatch)
    for batches in all_ranks(Dataset.from_hdf5(path).shuffle(0).batch(batch_size), size):
        list(batches)
    assert len(reads) <= most * -(-num_examples // 128)


def test_each_rank_reads_its_own_part_alone(numbered, all_ranks, monkeypatch):
    path = numbered(64, chunk=8, compression="gzip")
    reads = count_chunk_reads(monkeypatch)
    last = all_ranks(Dataset.from_hdf5(path).batch(32), size=4)[3]
    list(last)
    assert [start for _, _, start in reads] == [24, 56]


def test_foreign_byte_order_fixed_strings_bools_and_scalar_examples(tmp_path):
    with h5py.File(tmp_path / "kinds.h5", "w") as file:
        file["big"] = np.arange(4, dtype=">f8")
        file["text"] = np.array([b"ab", b"c", b"", b"d"])
        file["flag"] = np.array([True, False, True, False])
        file["none"] = np.zeros((4, 0, 2), np.int8)
        file.create_group("group")
    (batch,) = Dataset.from_hdf5(tmp_path / "kinds.h5").batch(4)
    assert batch["big"].dtype == np.dtype("f8")
    assert batch["big"].dtype.isnative
    assert batch["text"].tolist() == [b"ab", b"c", b"", b"d"]
    assert batch["flag"].tolist() == [True, False, True, False]
    assert batch["none"].shape == (4, 0, 2)


def first_use_raises(*args, match, **kwargs):
    dataset = Dataset.from_hdf5(*args, **kwargs)
    for use in (list, Dataset.cardinality, lambda d: d.element_spec):
        with pytest.raises(DataError, match=match):
            use(dataset)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?", "S3", "c8"])
def test_large_rows_of_many_chunks(tmp_path, monkeypatch, dtype, axis):
    monkeypatch.setattr(open_files, "_LARGE_ROW_BYTES", 64)
    path, values = tmp_path / "data.h5", np.arange(7 * 6 * 10).reshape(7, 6, 10).astype(dtype)
    values[3:5] = values.dtype.type()  # these chunks are never written
    with h5py.File(path, "w") as file:
        chunk = np.moveaxis(np.empty((1, 4, 3)), 0, axis).shape
        dataset = file.create_dataset("x", np.moveaxis(values, 0, axis).shape, dtype, chunks=chunk)
        for number in (0, 1, 2, 5, 6):
            dataset[(number,) if axis == 0 else (..., number)] = values[number]
        file["n"] = np.arange(7)
    rows = Dataset.from_hdf5(path, (Field("x", axis=axis), "n"))
    for dataset in (rows.batch(3), rows.shuffle(0).batch(2), rows.batch(9)):
        found, order = map(np.concatenate, zip(*dataset, strict=True))
        assert found.dtype == values.dtype.newbyteorder("=")
        assert sorted(order) == list(range(7))
        np.testing.assert_array_equal(found, values[order])


def test_files_that_cannot_be_read(numbered, tmp_path):
    first_use_raises(tmp_path / "gone.h5", match="no file .*gone.h5")
    first_use_raises(str(tmp_path / "*.hdf"), match=r"No file matches .*\*\.hdf")
    first_use_raises(tmp_path, match="folder")
    (tmp_path / "text.h5").write_text("not HDF5")
    first_use_raises(tmp_path / "text.h5", match=r"text\.h5 is not an HDF5 file")
    path = numbered(1000, chunk=100)
    path.write_bytes(path.read_bytes()[:5000])
    first_use_raises(path, match="data.h5 is truncated")


def test_fields_that_do_not_fit(numbered, tmp_path):
    path = numbered(5)
    first_use_raises(path, "labels", match="'labels' is missing in .*data.h5.* 'image', 'label'")
    first_use_raises(path, "image/x", match="'image/x' is missing")
    with h5py.File(path, "a") as file:
        file["nowhere"], file["type"] = h5py.SoftLink("/gone"), np.dtype("f4")
    first_use_raises(path, "nowhere", match="'nowhere' is a broken link")
    first_use_raises(path, "type", match="'type' is a named type")
    first_use_raises(numbered(0, name="empty.h5"), match=r"no examples in .*empty\.h5")
    with h5py.File(path, "a") as file:
        file["short"] = np.zeros(4)
        file["group/scalar"] = 3.0
    first_use_raises(path, ("image", "short"), match="'image' has 5, 'short' has 4")
    first_use_raises(path, "group", match="'group' is a group")
    first_use_raises(path, "group/scalar", match="'group/scalar' .* scalar")
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        file["group/x"] = np.zeros(3)
    first_use_raises(tmp_path / "groups.h5", match="no dataset at its top level")
    assert Dataset.from_hdf5(tmp_path / "groups.h5", "group/x").cardinality() == 3


def test_virtual_data_sets_and_what_they_lack(numbered, tmp_path):
    numbered(20, chunk=8, name="first.h5")
    numbered(12, name="second.h5", first=20)
    layout = h5py.VirtualLayout((32,), "i8")
    layout[:20] = h5py.VirtualSource("first.h5", "label", (20,))
    layout[20:] = h5py.VirtualSource("second.h5", "label", (12,))
    path = tmp_path / "joined.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("label", layout, fillvalue=-1)
    for dataset in (Dataset.from_hdf5(path), Dataset.from_hdf5(path).shuffle(0)):
        assert sorted(labels(dataset.batch(7))) == list(range(32))
    # HDF5 itself would give -1 for the rows that it does not find.
    with h5py.File(tmp_path / "second.h5", "a") as file:
        file.move("label", "other")
    first_use_raises(path, match="needs 'label' of .*second.h5")
    (tmp_path / "second.h5").unlink()
    first_use_raises(path, match="'/label' of .*joined.h5 needs the file second.h5, .*missing")


@pytest.mark.parametrize("chunk", [None, 8])
def test_external_links_lead_to_data_of_another_file(numbered, tmp_path, chunk):
    numbered(40, chunk=chunk, name="linked.h5")
    path = tmp_path / "linking.h5"
    with h5py.File(path, "w") as file:
        # Longer than the other file, so that its bytes can be read at any place of that.
        file["padding"] = np.full(2000, -1)
        file["label"] = h5py.ExternalLink("linked.h5", "label")
    dataset = Dataset.from_hdf5(path, {"label": "label"})
    for each in (dataset, dataset.shuffle(0)):
        assert sorted(labels(each.batch(20))) == list(range(40))


def test_data_outside_of_the_folder_of_their_file_are_named_in_a_warning(numbered, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    numbered(20, name="inside/near.h5")
    numbered(20, name="outside/far.h5")
    with h5py.File(inside / "data.h5", "w") as file:
        for name, path in ("near", inside / "raw"), ("far", outside / "raw"):
            file.create_dataset(name, data=np.arange(20), external=[(path, 0, 160)])
        for name, source in ("near.h5", "near.h5"), ("far.h5", f"{outside}/far.h5"):
            layout = h5py.VirtualLayout((20,), "i8")
            layout[:] = h5py.VirtualSource(source, "label", (20,))
            file.create_virtual_dataset(f"of {name}", layout)
            file[f"to {name}"] = h5py.ExternalLink(source, "label")
    far = outside / "far.h5"
    for name, elsewhere in ("far", outside / "raw"), ("of far.h5", far), ("to far.h5", far):
        dataset = Dataset.from_hdf5(inside / "data.h5", name)
        with pytest.warns(UserWarning, match=f"data.h5 .*: {elsewhere}. Read") as caught:
            assert [len(list(dataset.batch(20))) for _ in range(2)] == [1, 1]
        assert len(filenames(caught)) == 1
    for name in ("near", "of near.h5", "to near.h5"):  # warnings are errors here
        (batch,) = Dataset.from_hdf5(inside / "data.h5", name).batch(20)
        assert batch.tolist() == list(range(20))


def test_files_that_do_not_fit_each_other(numbered, tmp_path):
    paths = [numbered(5), tmp_path / "wide.h5"]
    with h5py.File(paths[1], "w") as file:
        file["image"] = np.zeros((5, 4), np.float32)
    first_use_raises(paths, "image", match=r"'image' .*\(4,\).*wide\.h5.*\(3,\).*data\.h5")


def test_damage_inside_a_file_names_the_rows(numbered):
    path = numbered(1000, chunk=100, compression="gzip", fletcher32=True)
    with h5py.File(path) as file:
        chunk = file["image"].id.get_chunk_info(3)
    raw = bytearray(path.read_bytes())
    raw[chunk.byte_offset + chunk.size // 2] ^= 0xFF
    path.write_bytes(raw)
    dataset = Dataset.from_hdf5(path, "image").batch(100)
    assert dataset.cardinality() == 10
    with pytest.raises(DataError, match=r"Rows 300 to 399 of the field 'image' of .*data\.h5"):
        list(dataset)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (([],), ValueError),
        ((3,), TypeError),
        (([3],), TypeError),
        ((b"x.h5",), TypeError),
        (({"x.h5", "y.h5"},), TypeError),
        (("x.h5", ()), ValueError),
        (("x.h5", 3), TypeError),
        (("x.h5", ("a", 3)), TypeError),
    ],
)
def test_arguments_that_are_no_files_or_fields(args, error):
    with pytest.raises(error):
        Dataset.from_hdf5(*args)


def test_a_driver_of_hdf5_is_no_argument():
    with pytest.raises(TypeError, match="unexpected keyword argument 'driver'"):
        Dataset.from_hdf5("x.h5", driver="mpio")


def test_files_are_closed_after_a_pass_and_after_one_broken_off(numbered):
    path = numbered(100, chunk=10)
    dataset = Dataset.from_hdf5(path).batch(10)
    list(dataset)
    iterator = iter(dataset)
    next(iterator)
    del iterator
    # HDF5 refuses to open a file for writing that is open for reading.
    with h5py.File(path, "r+") as file:
        assert file["label"].shape == (100,)


def test_the_garbage_collector_waits_for_no_reader(numbered, monkeypatch):
    # It may run in a thread that holds the lock of HDF5, for which the reader's threads wait.
    may_close, has_closed = threading.Event(), threading.Event()

    def close(files, close=OpenFiles.close):
        may_close.wait(60)
        close(files)
        has_closed.set()

    monkeypatch.setattr(OpenFiles, "close", close)

    def begun():
        iterator = iter(Dataset.from_hdf5(numbered(50, chunk=7)).batch(5))
        next(iterator)
        return iterator

    try:
        collect_in_a_thread(begun)
    finally:
        may_close.set()
    assert has_closed.wait(20)


def test_a_pass_begins_with_few_chunks_and_mixes_more_and_more(numbered, monkeypatch):
    monkeypatch.setattr("mpistrat.data.transformations.shuffle.WINDOW_BYTES", 2**18)
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    path = numbered(40_000, chunk=16, compression="gzip")
    usual = Dataset.from_hdf5(path).shuffle(0)
    num_chunks = [len({label // 16 for label in labels([batch])}) for batch in usual.batch(64)]
    assert num_chunks[0] < num_chunks[2] < max(num_chunks[10:])
    assert num_chunks[0] < max(num_chunks) / 2
    chosen = Dataset.from_hdf5(path).shuffle(0, window=20_000).batch(64)
    assert len({label // 16 for label in labels([next(iter(chosen))])}) > max(num_chunks) * 0.8
