"""HDF5Dataset: the strategy's order and state, in the hands of PyTorch's loaders."""

import contextlib
import itertools
import pickle

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

import mpistrat as ms  # noqa: E402
import mpistrat.torch as mst  # noqa: E402
from mpistrat.data.hdf5 import row_reader as hdf5_reader  # noqa: E402
from mpistrat.sharding import slice_of_rank  # noqa: E402
from mpistrat.torch import datasets  # noqa: E402
from tests.helpers import filenames  # noqa: E402

# torchdata asks a function of PyTorch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

BATCH = 10
LENGTH = 43
DTYPES = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@pytest.fixture
def path(world, mpi_tmp_path):
    """A file whose image, label and name all tell the number of the example."""
    path = mpi_tmp_path / "numbered.h5"
    if dist.get_rank() == 0:
        label = np.arange(LENGTH)
        with h5py.File(path, "w") as file:
            image = np.repeat(label[:, None], 6, axis=1).astype(np.uint16)
            file.create_dataset("image", data=image, chunks=(4, 6), compression="gzip")
            file.create_dataset("label", data=label)
            file.create_dataset("name", data=np.array([f"{n:3}" for n in label], "S3"))
    dist.barrier()
    return path


def batches_of(path, fields=("image", "label", "name")):
    return ms.data.Dataset.from_hdf5(path, fields).shuffle(3).batch(BATCH)


def labels(elements):
    return [label.tolist() for _, label, _ in elements]


def test_it_is_what_torch_calls_iterable_and_stateful(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    assert isinstance(dataset, IterableDataset)
    assert isinstance(dataset, Stateful)
    assert dataset.num_batches == len(dataset) == 5
    assert len(torch.utils.data.DataLoader(dataset, batch_size=None)) == 5
    endless = mst.HDF5Dataset(batches_of(path).repeat())
    assert endless.num_batches is None
    assert endless
    with pytest.raises(TypeError, match="the number of batches .* is unknown: it is endless"):
        len(endless)


def test_batches_are_this_ranks_part_of_the_global_ones(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = list(batches_of(path))
    seen = list(mst.HDF5Dataset(batches_of(path)))
    assert len(seen) == len(whole) == 5
    for (image, label, name), (images, all_labels, names) in zip(seen, whole, strict=True):
        mine = slice_of_rank(len(all_labels), size, rank)
        assert label.dtype == torch.int64
        assert label.tolist() == all_labels[mine].tolist()
        assert image.dtype == torch.uint16
        assert image.shape == (len(label), 6)
        assert (image.numpy() == images[mine]).all()
        assert isinstance(name, np.ndarray)
        assert name.tolist() == names[mine].tolist()


def test_ranks_without_examples_get_empty_tensors(path):
    """The last batch has 3 examples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    image, label, name = list(mst.HDF5Dataset(batches_of(path)))[-1]
    count = len(range(3)[slice_of_rank(3, size, rank)])
    assert image.shape == (count, 6)
    assert label.shape == (count,)
    assert name.shape == (count,)


def test_a_group_of_some_ranks_divides_among_them(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    members = list(range(0, size, 2))
    group = dist.new_group(members)
    if rank in members:
        whole = [batch[1] for batch in batches_of(path)]
        seen = labels(mst.HDF5Dataset(batches_of(path), group=group))
        own = members.index(rank)
        assert seen == [
            each[slice_of_rank(len(each), len(members), own)].tolist() for each in whole
        ]
        dist.destroy_process_group(group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_kept(world, dtype):
    array = np.arange(5 * dist.get_world_size()).astype(dtype)
    (tensor,) = mst.HDF5Dataset(ms.data.Dataset.from_arrays(array).batch(len(array)))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.numpy().dtype == array.dtype
    rank = dist.get_rank()
    assert (tensor.numpy() == array[5 * rank : 5 * rank + 5]).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.broadcast_to(np.float32(2), x.shape),
        lambda x: x[:, ::-1].astype(np.float32)[:, ::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(np.float32).T.copy().T,
        lambda x: torch.from_numpy(x).float(),
    ],
    ids=["read-only", "reversed", "byte order", "transposed", "tensor"],
)
def test_results_of_map_become_tensors(world, change):
    size = dist.get_world_size()
    rows = np.arange(6.0 * size).reshape(2 * size, 3)
    mapped = ms.data.Dataset.from_arrays(rows).batch(2 * size).map(change)
    (tensor,) = mst.HDF5Dataset(mapped)
    mine = rows[slice_of_rank(2 * size, size, dist.get_rank())]
    expected = change(mine.copy())
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == expected.tolist()
    tensor.zero_()


def test_functions_of_examples_may_return_tensors(world):
    rows = np.arange(12.0 * dist.get_world_size()).reshape(-1, 3)
    dataset = ms.data.Dataset.from_arrays(rows).map(lambda x: torch.from_numpy(x).flip(0))
    (tensor,) = mst.HDF5Dataset(dataset.batch(len(rows)))
    assert tensor.tolist() == rows[4 * dist.get_rank() :][:4, ::-1].tolist()


@pytest.mark.parametrize("value", [np.datetime64("2020"), "text", None], ids=str)
def test_what_torch_does_not_know_stays(world, value):
    mapped = ms.data.Dataset.range(4).batch(4).map(lambda x: {"x": x, "other": value})
    (element,) = mst.HDF5Dataset(mapped)
    assert not isinstance(element["other"], torch.Tensor)
    assert element["other"] == value


def spans_of(nest):
    """Return where arrays or tensors begin and end; those without elements have no address."""
    filled = [each for each in nest if len(each)]
    begins = [e.ctypes.data if isinstance(e, np.ndarray) else e.data_ptr() for e in filled]
    return [(begin, begin + e.nbytes) for begin, e in zip(begins, filled, strict=True)]


def lie_in(spans, blocks):
    """Return whether each span lies in one of the blocks: small batches are read together."""
    return all(any(b <= begin and end <= e for b, e in blocks) for begin, end in spans)


@pytest.mark.parametrize("window", [None, 1], ids=["shuffled", "in order"])
@pytest.mark.parametrize("is_cached", [True, False])
def test_no_tensor_is_copied_or_written_to(path, monkeypatch, window, is_cached):
    """Every tensor has the memory that was read into, and has it alone, for as long as it lives."""
    if not is_cached:
        monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    read_into = []
    read = hdf5_reader.Hdf5Reader.read

    def noting_read(self, block):
        nest = read(self, block)
        read_into.extend(spans_of(nest))
        return nest

    dataset = ms.data.Dataset.from_hdf5(path, ("image", "label"))
    dataset = (dataset.shuffle(3) if window is None else dataset).batch(BATCH).prefetch(2)
    batches = mst.HDF5Dataset(dataset)
    loader = DataLoader(batches, batch_size=None)
    monkeypatch.setattr(hdf5_reader.Hdf5Reader, "read", noting_read)
    kept = [element for _ in range(3) for element in loader]
    assert all(lie_in(spans_of(each), read_into) for each in kept)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in itertools.chain.from_iterable(kept)
        if tensor.numel()
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for image, label in kept:
        assert (image.int() == label[:, None]).all()
    numbers = [label.tolist() for _, label in kept]
    for image, label in kept:
        image.fill_(7)
        label.fill_(-1)
    batches.set_epoch(0)
    again = [element for _ in range(3) for element in loader]
    assert [label.tolist() for _, label in again] == numbers
    assert all((image.int() == label[:, None]).all() for image, label in again)
    assert all((image == 7).all() and (label == -1).all() for image, label in kept)


def stateful_loader(dataset):
    """Return torchdata's loader, where it is installed."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size=None)


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, stateful_loader], ids=["bare", "loader"])
@pytest.mark.parametrize("num_seen", range(6))
def test_state_is_after_the_batch_yielded_last(path, wrap, num_seen):
    one, other = (wrap(mst.HDF5Dataset(batches_of(path))) for _ in range(2))
    first, second, third = (labels(one) for _ in range(3))
    assert len({str(each) for each in (first, second, third)}) == 3
    one = wrap(mst.HDF5Dataset(batches_of(path)))
    assert labels(one) == first
    seen = iter(one)
    assert labels(itertools.islice(seen, num_seen)) == second[:num_seen]
    state = one.state_dict()
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert labels(other) == second[num_seen:]
    del seen
    assert labels(other) == third


def test_plain_loaders_leave_the_state_to_the_dataset(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    loader = DataLoader(dataset, batch_size=None)
    whole = labels(loader)
    dataset.set_epoch(0)
    assert labels(itertools.islice(loader, 2)) == whole[:2]
    state = dataset.state_dict()
    other = mst.HDF5Dataset(batches_of(path))
    other.load_state_dict(state)
    assert labels(DataLoader(other, batch_size=None)) == whole[2:]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_plain_loaders_may_pin(path):
    loader = DataLoader(mst.HDF5Dataset(batches_of(path)), batch_size=None, pin_memory=True)
    assert labels(loader) == labels(mst.HDF5Dataset(batches_of(path)))


def test_an_iterator_that_nobody_uses_is_no_pass(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    before = dataset.state_dict()
    iter(dataset)
    iter(DataLoader(dataset, batch_size=None))
    assert dataset.state_dict() == before


def test_set_epoch_begins_a_pass_by_its_number(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    passes = [labels(dataset) for _ in range(3)]
    for number in (1, 1, 0, 2):
        dataset.set_epoch(number)
        assert labels(dataset) == passes[number]
    dataset.set_epoch(1)
    assert labels(itertools.islice(dataset, 3)) == passes[1][:3]
    dataset.set_epoch(1)
    assert labels(dataset) == passes[1]
    for bad in (-1, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match="epoch"):
            dataset.set_epoch(bad)


def test_set_epoch_keeps_the_position_that_was_restored(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    passes = [labels(dataset) for _ in range(3)]
    dataset.set_epoch(1)
    assert len(list(itertools.islice(dataset, 3))) == 3
    state = dataset.state_dict()
    resumed = mst.HDF5Dataset(batches_of(path))
    resumed.load_state_dict(state)
    found = []
    for epoch in range(1, 3):
        resumed.set_epoch(epoch)
        found += labels(resumed)
    assert found == passes[1][3:] + passes[2]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert labels(resumed) == passes[2]


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, stateful_loader], ids=["bare", "loader"])
@pytest.mark.parametrize("is_in_scope", [True, False])
def test_a_checkpoint_holds_the_position(path, wrap, is_in_scope):
    file = path.with_name("position.h5")
    whole = labels(mst.HDF5Dataset(batches_of(path)))
    batches = wrap(mst.HDF5Dataset(batches_of(path)))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    seen = iter(batches)
    assert labels(itertools.islice(seen, 2)) == whole[:2]
    with mst.strategy().scope() if is_in_scope else contextlib.nullcontext():
        ms.Checkpoint(model=model, batches=batches).write(file)
    dist.barrier()
    other = wrap(mst.HDF5Dataset(batches_of(path)))
    with mst.strategy().scope() if is_in_scope else contextlib.nullcontext():
        ms.Checkpoint(model=model, batches=other).restore(file).assert_consumed()
    assert labels(other) == whole[2:]


def test_positions_of_other_data_are_refused(path):
    dataset = mst.HDF5Dataset(batches_of(path))
    assert len(list(itertools.islice(dataset, 2))) == 2
    other = mst.HDF5Dataset(ms.data.Dataset.range(50).batch(BATCH))
    with pytest.raises(ValueError, match="of a different dataset"):
        other.load_state_dict(dataset.state_dict())


def test_asynchronous_operations_may_be_under_way(path):
    tensors = [torch.ones(500_000) for _ in range(5)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    assert mst.HDF5Dataset(batches_of(path)).num_batches == 5
    for work in works:
        work.wait()
    assert all((each == dist.get_world_size()).all() for each in tensors)


def test_errors_of_data_stay_as_they_are(world):
    with pytest.raises(TypeError, match="needs a mpistrat.data.Dataset"):
        mst.HDF5Dataset([1, 2])
    with pytest.raises(ValueError, match="was not batched"):
        mst.HDF5Dataset(ms.data.Dataset.range(4))
    with pytest.raises(ms.errors.DataError, match="absent"):
        mst.HDF5Dataset(ms.data.Dataset.from_hdf5("absent.h5").batch(2))
    with pytest.raises(TypeError, match="pin_memory must be True or False"):
        mst.HDF5Dataset(ms.data.Dataset.range(4).batch(2), pin_memory="no")


def test_what_is_no_group_of_this_rank_is_refused(world):
    batches = ms.data.Dataset.range(4).batch(2)
    for group in (object(), dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="a process group that this rank is a member of"):
            mst.HDF5Dataset(batches, group=group)


@pytest.mark.parametrize("backend", ["mpistrat", "gloo"])
def test_a_checkpoint_is_of_the_ranks_of_its_dataset(path, backend):
    """The other ranks of the job do not take part."""
    group = dist.new_group([0], backend=backend)
    if dist.get_rank() == 0:
        dataset = mst.HDF5Dataset(batches_of(path), group=group)
        next(iter(dataset))
        ms.Checkpoint(batches=dataset).write(f"{path}.part")
        with ms.PreemptionCheckpointHandler(
            ms.CheckpointManager(ms.Checkpoint(batches=dataset), f"{path}.folder"), signals=[]
        ) as handler:
            assert not handler.save_checkpoint_if_preempted(1)
    dist.barrier()
    assert path.with_name(f"{path.name}.part").is_file()


def test_a_group_of_gloo_in_a_job_of_mpi_divides_in_the_same_way(path, gloo):
    over_gloo, over_mpi = (mst.HDF5Dataset(batches_of(path), group=each) for each in (gloo, None))
    assert type(over_gloo.strategy).__name__ == "GroupStrategy"
    assert (over_gloo.strategy.rank, over_gloo.strategy.size) == (
        dist.get_rank(),
        dist.get_world_size(),
    )
    assert labels(over_gloo) == labels(over_mpi)
    assert over_gloo.state_dict() == over_mpi.state_dict()
    # The world of the job is still that of MPI.
    assert ms.Checkpoint(batches=over_mpi).write(f"{path}.mpi") == f"{path}.mpi"
    assert ms.Checkpoint(batches=over_gloo).write(f"{path}.gloo") == f"{path}.gloo"


def test_workers_are_refused(world, monkeypatch):
    dataset = mst.HDF5Dataset(ms.data.Dataset.range(4).batch(2))
    with pytest.raises(TypeError, match="num_workers must be 0: mpistrat reads in threads"):
        pickle.dumps(dataset)
    monkeypatch.setattr(datasets, "get_worker_info", lambda: "a worker")
    with pytest.raises(ValueError, match="num_workers must be 0: mpistrat reads in threads"):
        iter(dataset)


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 1}, {"batch_size": 2, "drop_last": True}])
def test_loaders_that_would_stack_batches_are_refused(world, arguments):
    dataset = mst.HDF5Dataset(ms.data.Dataset.range(8).batch(4))
    with pytest.raises(ValueError, match="batch_size must be None: the dataset yields batches"):
        list(torch.utils.data.DataLoader(dataset, **arguments))
    assert len(list(torch.utils.data.DataLoader(dataset, batch_size=None))) == 2


def test_without_an_accelerator_pinning_is_refused_as_loaders_do(world, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    batches = ms.data.Dataset.range(4 * dist.get_world_size()).batch(4 * dist.get_world_size())
    with pytest.warns(UserWarning, match="no accelerator") as found:
        dataset = mst.HDF5Dataset(batches, pin_memory=True)
    assert filenames(found) == [__file__]
    assert [len(each) for each in dataset] == [4]


@pytest.mark.parametrize("is_cached", [True, False])
def test_files_are_read_into_pinned_memory(path, monkeypatch, is_cached):
    """Played without an accelerator: memory counts as pinned that was asked for as such."""
    if not is_cached:
        monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    pinned = []
    empty = torch.empty

    def noting_empty(*args, pin_memory=False, **kwargs):
        tensor = empty(*args, **kwargs)
        if pin_memory and tensor.numel():
            pinned.append(tensor)
        return tensor

    def is_pinned(tensor):
        return lie_in(spans_of([tensor]), spans_of(pinned))

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", noting_empty)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    whole = list(mst.HDF5Dataset(batches_of(path)))
    assert not pinned
    dataset = mst.HDF5Dataset(batches_of(path), pin_memory=True)
    for (image, label, name), expected in zip(dataset, whole, strict=True):
        assert image.is_pinned() or not len(image)
        assert label.is_pinned() or not len(label)
        assert image.tolist() == expected[0].tolist()
        assert label.tolist() == expected[1].tolist()
        assert name.tolist() == expected[2].tolist()
    assert len(pinned) <= 2 * sum(len(image) > 0 for image, _, _ in whole)  # nothing was copied
    mapped = batches_of(path).map(lambda image, label, name: image + 1)
    for plus_one, expected in zip(mst.HDF5Dataset(mapped, pin_memory=True), whole, strict=True):
        assert plus_one.is_pinned() or not len(plus_one)
        assert plus_one.tolist() == (expected[0].int() + 1).tolist()


def test_ragged_batches_are_jagged_tensors_and_text_stays(world):
    def example(n):
        return {"row": np.full(int(n) % 3, n, np.float32), "text": "x" * int(n), "n": n}

    dataset = mst.HDF5Dataset(ms.data.Dataset.range(8).map(example).ragged_batch(4))
    size, rank = dist.get_world_size(), dist.get_rank()
    for number, batch in enumerate(dataset):
        own = range(4 * number, 4 * number + 4)[slice_of_rank(4, size, rank)]
        row = batch["row"]
        assert row.is_nested
        assert row.layout == torch.jagged
        assert row.values().tolist() == [float(n) for n in own for _ in range(n % 3)]
        assert row.offsets().tolist() == np.cumsum([0, *(n % 3 for n in own)]).tolist()
        assert batch["text"].tolist() == ["x" * n for n in own]
        assert batch["n"].tolist() == list(own)
    assert dataset.state_dict()["pass"] == 1
