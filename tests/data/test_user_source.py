"""Objects of the program as sources: read by number or many at a time, chunk by chunk, ahead."""

import threading
import time

import h5py
import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset
from mpistrat.errors import DataError
from mpistrat.values import localize


class Squares:
    """Counts its calls, and how many threads are in one."""

    def __init__(self, n, **attributes):
        self.n, self.calls, self.within, self.most = n, [], 0, 0
        self.lock = threading.Lock()
        vars(self).update(attributes)

    def __len__(self):
        return self.n

    def note(self, numbers):
        with self.lock:
            self.calls.append(numbers)
            self.within += 1
            self.most = max(self.most, self.within)
        time.sleep(0.001)
        with self.lock:
            self.within -= 1


class One(Squares):
    def __getitem__(self, number):
        assert type(number) is int
        self.note(number)
        return {"x": number, "y": np.full(3, number**2)}


class Many(Squares):
    def read(self, numbers):
        self.note(numbers.tolist())
        return {"x": numbers, "y": np.repeat(numbers[:, None] ** 2, 3, axis=1)}


def read_threads():
    return [each for each in threading.enumerate() if each.name.startswith("mpistrat-source")]


@pytest.mark.parametrize("cls", [One, Many])
@pytest.mark.parametrize("chunks", [None, 7, [0, 10, 40], np.array([40, 10])])
def test_any_number_of_ranks_reads_the_same(all_ranks, cls, chunks):
    attributes = {} if chunks is None else {"chunk_rows": chunks}
    source = cls(100, **attributes)
    dataset = Dataset.from_source(source).shuffle(0).batch(16)
    assert dataset.element_spec["y"] == ArraySpec((None, 3), np.int64)
    expected = [batch["x"].tolist() for batch in dataset]
    assert sorted(np.concatenate(expected)) == list(range(100))
    for size in (2, 3):
        for number, parts in enumerate(zip(*all_ranks(dataset, size), strict=True)):
            batches = [localize(part) for part in parts]
            x = np.concatenate([batch["x"] for batch in batches])
            assert x.tolist() == expected[number]
            y = np.concatenate([batch["y"] for batch in batches])
            assert (y == x[:, None] ** 2).all()
    assert not read_threads()


def test_each_chunk_is_read_once():
    source = Many(100, chunk_rows=10)
    dataset = Dataset.from_source(source)
    assert dataset.element_spec["x"] == ArraySpec((), np.int64)
    source.calls.clear()
    list(dataset.shuffle(0).batch(5))
    list(dataset.batch(7))
    chunks = [list(range(first, first + 10)) for first in range(0, 100, 10)]
    assert sorted(source.calls[:10]) == chunks
    assert source.calls[10:] == chunks


@pytest.mark.parametrize("thread_safe", [True, False])
def test_threads_call_it(monkeypatch, thread_safe):
    monkeypatch.setattr("mpistrat.data.sources.indexable.cores_of_rank", lambda: 4)
    source = One(300)
    list(Dataset.from_source(source, thread_safe=thread_safe).batch(100))
    assert source.most > 1 if thread_safe else source.most == 1
    assert not read_threads()


def test_views_of_it():
    dataset = Dataset.from_source(Many(30, chunk_rows=4))
    assert [int(e["x"]) for e in dataset.select([3, 29, 3])] == [3, 29, 3]
    assert [e["x"].tolist() for e in dataset.window(2, 14)] == [[0, 1], [14, 15], [28, 29]]
    assert len(list(Dataset.from_source(Many(0, element_spec={"x": ArraySpec((), "i8")})))) == 0


class Words:
    element_spec = ArraySpec((None,), np.uint8)

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.arange(number, dtype=np.uint8)


def test_examples_of_several_shapes_need_a_spec():
    assert [len(x) for x in Dataset.from_source(Words())] == [0, 1, 2, 3]
    plain = type("Plain", (Words,), {"element_spec": None})()
    with pytest.raises(DataError, match=r"Plain.*element_spec of the source, with None"):
        list(Dataset.from_source(plain))


def test_sources_that_do_not_fit():
    for wrong in (3, iter([1]), {1, 2}):
        with pytest.raises(TypeError, match="__len__"):
            Dataset.from_source(wrong)
    short = Many(5)
    short.read = lambda numbers: numbers[:1]
    with pytest.raises(DataError, match=r"shape \(1,\).* for 4 numbers"):
        list(Dataset.from_source(short).skip(1))
    with pytest.raises(TypeError, match="thread_safe"):
        Dataset.from_source(Many(5), thread_safe=1)

    class Broken(One):
        def __getitem__(self, number):
            if number == 7:
                raise OSError("row 7 is gone")
            return super().__getitem__(number)

    with pytest.raises(OSError, match="row 7"):
        list(Dataset.from_source(Broken(20)).batch(2))


def test_lazy_arrays_are_pointed_to_what_reads_them(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = file.create_dataset("x", data=np.arange(3))
        with pytest.raises(TypeError, match="h5py .*from_hdf5"):
            Dataset.from_arrays({"x": rows})
    for package in ("zarr", "dask", "xarray"):
        cls = type("Array", (), {"__module__": f"{package}.core.array"})
        with pytest.raises(TypeError, match=f"{package} .*from_source"):
            Dataset.from_arrays((np.zeros(3), cls()))
