"""Dataset: sources, transformations, iteration and position."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.fingerprint import position_layout
from mpistrat.data.hdf5.fields import Field
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.data.iterators import ElementIterator, Position
from mpistrat.data.order import SameOrder, Transformation
from mpistrat.data.pipeline import Pipeline, Prefetch
from mpistrat.data.sources.indexable import UserSource, refuse_lazy_arrays
from mpistrat.data.sources.memory import ArraySource, CountSource, GeneratorSource, RangeSource
from mpistrat.data.transformations.batch import (
    Batch,
    Enumerate,
    Unbatch,
    WholeBatches,
    refuse_numbered,
)
from mpistrat.data.transformations.cache import Cached, size_in_bytes
from mpistrat.data.transformations.concatenate import Concatenated
from mpistrat.data.transformations.filter import Filtered
from mpistrat.data.transformations.ignore_errors import ValidElements
from mpistrat.data.transformations.map import AUTOTUNE, Map, wrapped
from mpistrat.data.transformations.pad import PaddedBatch, RaggedBatch
from mpistrat.data.transformations.repeat import Repeat
from mpistrat.data.transformations.sample import (
    Mixed,
    SampleBatches,
    Sampled,
    Weights,
    checked_weights,
)
from mpistrat.data.transformations.select import Indices, SelectBatches, Selected
from mpistrat.data.transformations.shuffle import Shuffle
from mpistrat.data.transformations.take import Shard, Skip, Take
from mpistrat.data.transformations.unbatch import Rows
from mpistrat.data.transformations.window import Windowed
from mpistrat.data.transformations.zip import Zipped
from mpistrat.data.views import View, view_or_stream
from mpistrat.options import AutoShardPolicy
from mpistrat.system.hints import HintedType
from mpistrat.user_warnings import note_batch

if TYPE_CHECKING:
    from typing_extensions import Self

_Name = str | Field

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _refuse_buffer_size(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate `shuffle` so that calls in the style of tf.data raise an error with the remedy."""

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "buffer_size" in kwargs:
            raise TypeError(
                "shuffle has no buffer_size: all elements are mixed, and files are read by chunks. "
                "Write shuffle(seed=0), with window=... only to mix fewer at a time."
            )
        if len(args) < 2 and "seed" not in kwargs:
            raise TypeError(
                "shuffle needs a seed, by which all ranks find the same order. Write "
                "shuffle(seed=0): each epoch still has its own order."
            )
        return method(*args, **kwargs)

    return checked


class Dataset(metaclass=HintedType):
    """Examples, or batches of them, in a fixed order.

    Create one with `from_hdf5`, `from_arrays`, `from_source`, `from_generator` or `range`, or
    combine datasets with `zip` or `sample_from_datasets`. Each transformation returns a new
    dataset and leaves this one unchanged. Nothing is read before the first use.

    Iterating yields nests of NumPy arrays. Each iteration is one epoch, that is, one pass over
    the data; epochs are counted from 0. The default strategy distributes nothing and returns the
    dataset itself, so a dataset has a position that can be saved, like a `DistributedDataset`.

    Parameters
    ----------
    pipeline : Pipeline
        The source and the transformations. Programs do not call the constructor, but one of the
        functions above.
    auto_shard_policy : AutoShardPolicy
        How the ranks divide the dataset.

    Examples
    --------
    >>> fields = ("train/image", "train/label")
    >>> digits = ms.data.Dataset.from_hdf5("data/digits.h5", fields)
    >>> digits = digits.map(lambda image, label: (image / 16, label))
    >>> batches = digits.shuffle(seed=1).batch(128, drop_remainder=True).prefetch(2)
    >>> batches.element_spec[1]
    ArraySpec((128,), uint8)
    >>> numbers = ms.data.Dataset.range(10)
    >>> [batch.tolist() for batch in numbers.skip(2).take(6).shard(2, 0).repeat(2).batch(3)]
    [[2, 4, 6], [2, 4, 6]]
    >>> ms.data.Dataset.from_arrays({"x": np.zeros((5, 2))}).cardinality()
    5
    >>> spec = ms.data.ArraySpec((), "float64")
    >>> list(ms.data.Dataset.from_generator(lambda: iter([0.5, 1.5]), spec))
    [np.float64(0.5), np.float64(1.5)]
    >>> file_per_rank = batches.with_options(auto_shard_policy=ms.data.AutoShardPolicy.FILE)

    The position can be saved and restored:

    >>> first = next(iter(batches))
    >>> batches.load_state_dict(batches.state_dict())
    """

    def __init__(
        self, pipeline: Pipeline, auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    ) -> None:
        self._pipeline = pipeline
        self._auto_shard_policy = auto_shard_policy
        self._position = Position()

    @classmethod
    def from_hdf5(
        cls,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        fields: _Name | tuple[_Name, ...] | list[_Name] | dict[str, _Name] | None = None,
        *,
        swmr: bool = False,
    ) -> Dataset:
        """Return the examples of HDF5 files, one file after the other. Local.

        Parameters
        ----------
        files : path, list of paths, or glob pattern
            The files to read. The files of a pattern are sorted by name; a list keeps its order.
        fields : str, Field, or a tuple or dict of them, optional
            Paths of the HDF5 datasets to read, all of the same length, or `Field` objects. An
            example has the same structure: an array, a tuple, or a dict with the given labels.
            With ``*`` in a path, each match is one example. The rows of a compound dataset become
            dicts of their members. ``None`` reads every top-level dataset that can be read, as a
            dict, and lists the others in a warning.
        swmr : bool
            Whether a program that has set ``swmr_mode`` is still writing the files. The number
            of examples is fixed at the first use, or by the call that distributes the dataset.

        Returns
        -------
        Dataset
            The examples; the files are opened on first use.

        Raises
        ------
        TypeError, ValueError
            If an argument has a different form.
        DataError
            On first use, if a file is missing or damaged, a field is missing or does not fit
            the others, or there are no examples.
        """
        return cls(Pipeline(Hdf5Source(files, fields, as_bool("swmr", swmr))))

    @classmethod
    def from_arrays(cls, nest: Any) -> Dataset:
        """Return the rows of the arrays in `nest` as examples. Local.

        Parameters
        ----------
        nest : nest of arrays
            Arrays of the same length; a list is a nest too. All ranks must pass the same arrays:
            `Strategy.distribute_dataset` compares digests of them.

        Returns
        -------
        Dataset
            One example per row, with the structure of `nest`.

        Raises
        ------
        TypeError
            For datasets of h5py, and for arrays of zarr, dask and xarray, because every rank would
            read all of them: use `from_hdf5` or `from_source`.
        DataError
            If there is no array, if an array is 0-d or masked, or if lengths differ.
        """
        refuse_lazy_arrays(nest)
        return cls(Pipeline(ArraySource(nest)))

    @classmethod
    def from_source(cls, source: Any, thread_safe: bool = True) -> Dataset:
        """Return the examples of any object with a length and access by number. Local.

        Such an object may be a zarr or dask array, a table of a database, or a folder of files.
        Each rank reads the examples of its slices ahead of their use, in threads. The sources of
        all ranks must have the same examples.

        Parameters
        ----------
        source : object
            Has ``__len__``, and either ``__getitem__(number)``, which returns one example, or
            ``read(numbers)``, which takes an int64 array and returns the nest of stacked arrays.
            The optional attribute `chunk_rows` says which examples are best read together. It is
            the number of examples per chunk, or an array with the first row of each chunk. Each
            chunk is then read whole, in one call, and about once per shuffled epoch. The optional
            attribute `element_spec` is the nest of `ArraySpec` of one example, with ``None`` for
            lengths that differ. Without it, all examples must have the shapes and dtypes of the
            first one.
        thread_safe : bool
            Whether several threads may call `source` at the same time. If false, calls never
            overlap, but the iterating thread and one that reads ahead both make some.

        Returns
        -------
        Dataset
            The examples of `source`, in the order of their numbers.

        Raises
        ------
        TypeError
            If `source` lacks these methods.
        DataError
            While iterating, if an example does not fit the spec.

        Examples
        --------
        >>> class Squares:
        ...     chunk_rows = 4
        ...     def __len__(self):
        ...         return 10
        ...     def read(self, numbers):
        ...         return {"x": numbers, "y": numbers**2}
        >>> squares = ms.data.Dataset.from_source(Squares())
        >>> next(iter(squares.batch(3)))["y"].tolist()
        [0, 1, 4]
        """
        return cls(Pipeline(UserSource(source, as_bool("thread_safe", thread_safe))))

    @classmethod
    def from_generator(cls, fn: Callable[[], Iterable[Any]], element_spec: Any) -> Dataset:
        """Return the elements of ``fn()``, which is called again for each epoch. Local.

        Every rank runs the whole generator, because a generator cannot be split before it has run.
        So `fn` must yield the same elements on all ranks.

        Parameters
        ----------
        fn : callable
            Takes no arguments and returns an iterable.
        element_spec : nest of ArraySpec
            Structure, shapes and dtypes of one element. Values are cast to a dtype of the same
            kind if they survive it: integers must be in range, strings are not cut, and finite
            numbers must not become infinite.

        Returns
        -------
        Dataset
            The elements, of unknown number.

        Raises
        ------
        TypeError
            If `fn` is not callable or `element_spec` is not a nest of `ArraySpec`.
        DataError
            While iterating, if an element does not fit `element_spec`, or if `fn` does not return
            an iterable, or returns the same generator again.
        """
        return cls(Pipeline(GeneratorSource(fn, element_spec)))

    @classmethod
    def range(cls, n: int) -> Dataset:
        """Return the integers 0 to `n` - 1, as int64. Local.

        Parameters
        ----------
        n : int
            Number of integers, at least 0.

        Returns
        -------
        Dataset
            Its elements are scalars.
        """
        return cls(Pipeline(RangeSource(as_integer("n", n, 0, maximum=2**63 - 1))))

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element. If there is a `map`, it is called on one example.

        Local.
        """
        return self._pipeline.element_spec

    def cardinality(self) -> int:
        """Return the number of elements per epoch. Local.

        Returns
        -------
        int
            At least 0; -1 if the dataset is endless, -2 if the number is unknown.
        """
        return self._pipeline.length

    def __iter__(self) -> ElementIterator:
        pass_number, start, on_step = self._position.begin()
        elements = self._pipeline.elements(pass_number, start)
        on_batch = None if self._pipeline.batch is None else note_batch
        return ElementIterator(elements, on_step, of=self, on_element=on_batch)

    def __repr__(self) -> str:
        return f"<Dataset {self._pipeline}{self._position}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as a `DistributedDataset` with the same batches does. Local.

        Returns
        -------
        dict
            JSON values; see `DistributedDataset.state_dict`.
        """
        return self._position.state(position_layout(self._pipeline))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position: the next ``iter()`` continues that epoch. Local.

        Parameters
        ----------
        state : dict
            A result of `state_dict`, from a dataset with the same files, order and batch size.

        Raises
        ------
        TypeError, ValueError
            If `state` is not a position, or is in the middle of an epoch of a different dataset.
        """
        self._position.load(state, position_layout(self._pipeline), self._pipeline.length)

    @_refuse_buffer_size
    def shuffle(
        self, seed: int, reshuffle_each_iteration: bool = True, window: int | None = None
    ) -> Self:
        """Return the elements in random order. Local.

        The order depends only on the files, `seed`, the epoch and the batch size. It is the same
        on any number of ranks.

        HDF5 files are not shuffled as a whole. Chunks are read in random order, and the rows of as
        many chunks as fit into the window are mixed. Other elements stay within their window.

        Parameters
        ----------
        seed : int
            Seed of the order, at least 0.
        reshuffle_each_iteration : bool
            Whether each epoch, and each repetition of `repeat`, has a new order. If false, all have
            the same one.
        window : int, optional
            Number of elements that are mixed at a time. Default: for files, as many as fit into
            48 MiB, of which a rank holds two windows; otherwise all elements. A smaller window
            needs less memory and mixes less.

        Returns
        -------
        Dataset
            A new dataset; this one is unchanged.

        Raises
        ------
        TypeError, ValueError
            If `seed` is not an integer of at least 0, `window` not an integer of at least 1, or
            `reshuffle_each_iteration` not a bool; and for `buffer_size`, which only tf.data has.

        Notes
        -----
        An epoch over files interleaves L partitions of the chunks, and each partition fills a fixed
        part of every batch. On N ranks, a chunk is decoded about once over the whole job if N
        divides L, up to twice on average if N is smaller and does not divide L, and about N / L
        times if N is larger. L is at most an eighth of the number of chunks (half of it up to 4
        partitions), half the number of chunks in the window, the batch size, and one per 64
        examples. The chunks that count are the chunks of the field with the largest rows. If
        another field has longer chunks, every rank that needs a row of one decodes it.
        """
        window = None if window is None else as_integer("window", window, 1)
        reshuffles = as_bool("reshuffle_each_iteration", reshuffle_each_iteration)
        return self._then(Shuffle(as_integer("seed", seed, 0), reshuffles, window))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> Self:
        """Return the elements in batches: arrays with one more dimension in front. Local.

        Batches can be batched again, for example for several steps at a time. The batches of the
        last call are the global batches, which the ranks divide. All inner batches must have the
        same length, so pass ``drop_remainder=True`` in every call but the last.

        Parameters
        ----------
        global_batch_size : int
            Number of elements per batch, over all replicas together.
        drop_remainder : bool
            Whether to leave out the last batch if it is shorter.

        Returns
        -------
        Dataset
            The batches.

        Raises
        ------
        TypeError, ValueError
            If `global_batch_size` is not an integer of at least 1, or `drop_remainder` not a bool.
        DataError
            While iterating, if a batch would hold batches of different lengths.
        """
        return self._batched(Batch, global_batch_size, drop_remainder)

    def _batched(
        self, make: Callable[..., Batch], batch_size: Any, drop_remainder: Any, *options: Any
    ) -> Self:
        """Return the elements in batches; `make` is the class, called with checked arguments."""
        size = as_integer("global_batch_size", batch_size, 1)
        return self._then(make(size, as_bool("drop_remainder", drop_remainder), *options))

    def map(
        self, fn: Callable[..., Any], seed: int = 0, num_parallel_calls: int | None = None
    ) -> Self:
        """Return `fn` of each element. Local.

        Before `batch`, `fn` gets one example. After `batch`, it gets this rank's slice of the
        batch, whose length may be 0. `fn` must be pure, because it is not defined how often and in
        which order it is called. It should draw random numbers from `mpistrat.data.example_rng`,
        so that they depend on the example and not on the rank.

        If `fn` comes before `batch`, all examples get the dtype of the first example of the
        dataset without shuffling, on any number of ranks. Strings are at least as wide as the
        strings of the source.

        Parameters
        ----------
        fn : callable
            Takes an element, or one argument per item if the element is a tuple. Returns the new
            element, a nest of arrays, numbers or strings.
        seed : int
            Seed of `example_rng` and `example_rngs` in `fn`, at least 0.
        num_parallel_calls : int, optional
            Number of threads that call `fn`. Threads help if `fn` releases Python's lock, as
            decoders and NumPy do. The elements keep their order, at most twice as many results
            wait, and an error cancels the calls after it. ``None``: one call at a time, in the
            thread of the iterator; -1 (`mpistrat.data.AUTOTUNE`): this rank's share of the cores.

        Returns
        -------
        Dataset
            The results of `fn`, in the same order.

        Raises
        ------
        TypeError, ValueError
            If `fn` is not callable, `seed` is not an integer of at least 0, or
            `num_parallel_calls` is neither -1 nor an integer of at least 1.
        DataError
            While iterating, if the results for a batch cannot be stacked, or do not fit the dtype
            of the first one.
        """
        if not callable(fn):
            raise TypeError(f"map needs a function, not {fn!r}.")
        seed = as_integer("seed", seed, 0)
        if num_parallel_calls is not None and num_parallel_calls != AUTOTUNE:
            num_parallel_calls = as_integer("num_parallel_calls", num_parallel_calls, 1)
        return self._then(Map(fn, seed, num_parallel_calls))

    def repeat(self, count: int | None = None) -> Self:
        """Return the elements `count` times over. Local.

        Parameters
        ----------
        count : int, optional
            Number of repetitions; ``None`` or -1 repeats endlessly.

        Returns
        -------
        Dataset
            A new dataset, `count` times as long.
        """
        if count is not None:
            count = as_integer("count", count, -1)
        return self._then(Repeat(None if count == -1 else count))

    def take(self, n: int) -> Self:
        """Return the first `n` elements. Local.

        Parameters
        ----------
        n : int
            Number of elements, at least 0. If there are fewer, all are taken.

        Returns
        -------
        Dataset
            A new dataset; this one is unchanged.
        """
        return self._then(Take(as_integer("n", n, 0)))

    def skip(self, n: int) -> Self:
        """Return the elements after the first `n`. Local.

        Parameters
        ----------
        n : int
            Number of elements to leave out, at least 0.

        Returns
        -------
        Dataset
            A new dataset; this one is unchanged.
        """
        return self._then(Skip(as_integer("n", n, 0)))

    def shard(self, num_shards: int, index: int) -> Self:
        """Return every `num_shards`-th element, from element `index` on. Local.

        Parameters
        ----------
        num_shards : int
            Number of shards, at least 1.
        index : int
            Number of this shard, from 0.

        Returns
        -------
        Dataset
            The elements of one shard.

        Raises
        ------
        TypeError, ValueError
            If ``0 <= index < num_shards`` does not hold for two integers.
        """
        num_shards, index = as_integer("num_shards", num_shards, 1), as_integer("index", index, 0)
        if index >= num_shards:
            raise ValueError(f"index must be less than num_shards={num_shards}, not {index}.")
        return self._then(Shard(num_shards, index))

    def prefetch(self, n: int) -> Self:
        """Return the same elements; a thread prepares up to `n` of them ahead. Local.

        The thread always prepares elements at the end of the pipeline, whichever transformations
        come after `prefetch`. Functions passed to `map` run in that thread.

        Parameters
        ----------
        n : int
            Number of elements to prepare ahead, at least 1.

        Returns
        -------
        Dataset
            The same elements in the same order.
        """
        return self._then(Prefetch(as_integer("n", n, 1)))

    def with_options(self, *, auto_shard_policy: AutoShardPolicy) -> Self:
        """Return the same elements with a different way to divide them among ranks. Local.

        Parameters
        ----------
        auto_shard_policy : AutoShardPolicy
            How the ranks divide the dataset, the same on all ranks.

        Returns
        -------
        Dataset
            A new dataset; this one is unchanged.

        Raises
        ------
        TypeError
            If `auto_shard_policy` is not an `AutoShardPolicy`.
        """
        if not isinstance(auto_shard_policy, AutoShardPolicy):
            raise TypeError(
                f"auto_shard_policy must be an AutoShardPolicy, not {auto_shard_policy!r}."
            )
        return type(self)(self._pipeline, auto_shard_policy)

    def _then(self, transformation: Transformation) -> Self:
        return type(self)(self._pipeline.then(transformation), self._auto_shard_policy)

    @classmethod
    def zip(cls, datasets: Any) -> Self:
        """Return nests of the elements at the same position of several datasets. Local.

        Each dataset keeps its own reader. A later `shuffle` puts all datasets into the same order,
        and still reads files by chunks, namely the chunks of the dataset with the largest
        elements.

        Parameters
        ----------
        datasets : nest of Dataset
            A tuple, a dict, or nests of them. An element has the same structure.

        Returns
        -------
        Dataset
            The nests, as many as the shortest dataset has elements.

        Raises
        ------
        TypeError
            If a leaf of the nest is not a dataset.
        ValueError
            If the nest is empty, or a dataset is batched: batch the zipped dataset.

        Examples
        --------
        >>> images = ms.data.Dataset.from_arrays(np.zeros((3, 2)))
        >>> labels = ms.data.Dataset.from_arrays(np.array([5, 6, 7]))
        >>> both = ms.data.Dataset.zip({"image": images, "label": labels})
        >>> [int(element["label"]) for element in both.shuffle(seed=1).take(2)]
        [7, 5]
        """
        leaves, structure = nests.flatten(datasets, atoms=(Dataset,))
        if not leaves:
            raise ValueError("zip needs at least one dataset, but the nest is empty.")
        children = [_unbatched("zip", leaf) for leaf in leaves]
        return cls(
            Pipeline(view_or_stream(Zipped(structure, children))), leaves[0]._auto_shard_policy
        )

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Iterable[Dataset],
        weights: Any = None,
        seed: int = 0,
        stop_on_empty: bool = True,
    ) -> Self:
        """Return a mixture: each element is the next one of a dataset drawn by weight. Local.

        The choice of the next dataset depends only on `seed`, so it is the same in each epoch.
        Shuffle the datasets themselves to get a new order.

        Parameters
        ----------
        datasets : list of Dataset
            Datasets with the same `element_spec`, not batched.
        weights : sequence of float, optional
            How often each dataset is drawn, relative to the others. ``None``: all equally often.
        seed : int
            Seed of the draws, at least 0.
        stop_on_empty : bool
            Whether the mixture ends when a dataset is drawn that has no more elements. If false,
            that dataset is no longer drawn, and the mixture ends with the last dataset.

        Returns
        -------
        Dataset
            The mixture, divided among ranks by the policy of the first dataset.

        Raises
        ------
        TypeError, ValueError
            If an argument has a different form, or there is not one weight per dataset.
        DataError
            If the specs differ; raised at the latest on first use.

        Examples
        --------
        >>> zeros = ms.data.Dataset.from_arrays(np.zeros(4, int)).repeat()
        >>> ones = ms.data.Dataset.from_arrays(np.ones(4, int)).repeat()
        >>> mixed = ms.data.Dataset.sample_from_datasets([zeros, ones], [0.25, 0.75])
        >>> 600 < sum(mixed.take(1000)) < 900
        np.True_
        """
        datasets = list(datasets)
        children = [_unbatched("sample_from_datasets", each) for each in datasets]
        if not children:
            raise ValueError("sample_from_datasets needs at least one dataset.")
        weights = np.ones(len(children)) if weights is None else weights
        weights = checked_weights("sample_from_datasets", weights)
        if len(weights) != len(children):
            raise ValueError(
                f"sample_from_datasets needs a weight for each of {len(children)} datasets, not "
                f"{len(weights)}."
            )
        stops = as_bool("stop_on_empty", stop_on_empty)
        view = Mixed(children, weights, as_integer("seed", seed, 0), stops)
        _check_specs(view)
        return cls(Pipeline(view_or_stream(view)), policy_of(next(iter(datasets))))

    def concatenate(self, other: Dataset) -> Self:
        """Return the elements of this dataset, then the elements of `other`. Local.

        Parameters
        ----------
        other : Dataset
            A dataset with the same `element_spec`, not batched. Lengths that differ become
            ``None`` in the spec.

        Returns
        -------
        Dataset
            A new dataset, as long as both together.

        Raises
        ------
        TypeError
            If `other` is not a dataset.
        ValueError
            If one of the two is batched.
        DataError
            If the specs differ; raised at the latest on first use.

        Examples
        --------
        >>> numbers = ms.data.Dataset.range(2).concatenate(ms.data.Dataset.range(3))
        >>> [int(x) for x in numbers]
        [0, 1, 0, 1, 2]
        """
        view = Concatenated([_unbatched("concatenate", each) for each in (self, other)])
        _check_specs(view)
        return self._from(view)

    def select(self, indices: Any) -> Self:
        """Return the elements with the given numbers, in that order. Local.

        A later `shuffle` still reads files by chunks. Without one, elements are read in the order
        of `indices`: sort them if the order does not matter.

        Parameters
        ----------
        indices : sequence of int, or of bool
            Numbers of elements as in NumPy: negative ones count from the end, and a number may
            occur several times. Or a mask with one entry per element. All ranks must pass the same.

        Returns
        -------
        Dataset
            The selected elements.

        Raises
        ------
        TypeError
            If `indices` are neither integers nor bools, or not one-dimensional.
        IndexError
            If a number is out of range, or the mask has a different length; for files on first use.
        ValueError
            If the length of the dataset is not known, or endless.

        Examples
        --------
        >>> [int(x) for x in ms.data.Dataset.range(5).select([3, -1, 0, 3])]
        [3, 4, 0, 3]
        >>> [int(x) for x in ms.data.Dataset.range(3).select([True, False, True])]
        [0, 2]
        """
        found = Indices(indices)
        _check_finite("select", self._pipeline)
        if self._pipeline.batch is not None:
            return self._then(SelectBatches(found))
        return self._from(Selected(self._pipeline, found))

    def filter(self, fn: Callable[..., Any], fields: Any = None) -> Self:
        """Return the elements for which `fn` is true. Local.

        `fn` is evaluated once, on first use. If the dataset is distributed, each rank evaluates
        its share of the elements and the ranks exchange the results. In
        `distribute_datasets_from_function`, and if a program iterates over the dataset itself,
        each rank evaluates all of its dataset. `fn` gets the results of an earlier `map`, which
        must not be random. Afterwards the number of elements is known, and a `shuffle` still reads
        files by chunks. After `from_generator`, `fn` is evaluated in each epoch, and the number of
        elements stays unknown.

        Parameters
        ----------
        fn : callable
            Takes an element, or one argument per item if the element is a tuple. Returns a truth
            value.
        fields : str, int, or list of them, optional
            Labels in a dict, or positions in a tuple. Only these fields are read and passed to
            `fn`. Default: all.

        Returns
        -------
        Dataset
            The elements that are kept.

        Raises
        ------
        TypeError
            If `fn` is not callable.
        ValueError
            After `batch` or `repeat`. On first use, if an earlier `map` uses `example_rng`, if
            each epoch has different elements, or if an element lacks one of the fields.

        Examples
        --------
        >>> fields = ("train/image", "train/label")
        >>> digits = ms.data.Dataset.from_hdf5("data/digits.h5", fields)
        >>> small = digits.filter(lambda label: label < 3, fields=1)
        >>> small.shuffle(seed=0).batch(64).cardinality()
        7
        """
        if not callable(fn):
            raise TypeError(f"filter needs a function, not {fn!r}.")
        pipeline = self._pipeline
        if pipeline.batch is not None:
            raise ValueError("filter chooses single elements: call it before batch, not after it.")
        if any(isinstance(each, Repeat) and each.count != 1 for each in pipeline.transformations):
            raise ValueError(
                "filter is evaluated once for all repetitions: call it before repeat, not after it."
            )
        if not pipeline.source.is_stream:
            _check_finite("filter", pipeline)
        return self._from(Filtered(pipeline, fn, fields))

    def window(
        self, size: int, stride: int = 1, dilation: int = 1, across_files: bool = False
    ) -> Self:
        """Return windows: `size` consecutive elements stacked along a new first dimension. Local.

        Windows that would be shorter are left out. A later `shuffle` still reads files by chunks,
        and overlapping windows share the decoded chunks.

        Parameters
        ----------
        size : int
            Number of elements per window.
        stride : int
            Distance between the first elements of neighbouring windows, in elements. It starts
            again with the first element of each file.
        dilation : int
            Distance between neighbouring elements within a window, in elements.
        across_files : bool
            Whether a window may begin in one file of `from_hdf5` and end in the next.

        Returns
        -------
        Dataset
            The windows.

        Raises
        ------
        TypeError, ValueError
            If an argument is not an integer of at least 1, or not a bool; after `batch`; and if
            each epoch has different elements in the same file.
        DataError
            While iterating, if elements differ in shape.

        Examples
        --------
        >>> windows = ms.data.Dataset.range(7).window(3, stride=2)
        >>> [window.tolist() for window in windows]
        [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
        """
        size, stride = as_integer("size", size, 1), as_integer("stride", stride, 1)
        dilation = as_integer("dilation", dilation, 1)
        across = as_bool("across_files", across_files)
        return self._from(Windowed(_unbatched("window", self), size, stride, dilation, across))

    def enumerate(self, start: int = 0) -> Self:
        """Return pairs of a number and an element. Local.

        The numbers are int64 and count the elements in the order of this dataset, shuffled or not.
        After `batch` they count global batches: then the number is a scalar, and all ranks get the
        same one.

        Parameters
        ----------
        start : int
            The first number.

        Returns
        -------
        Dataset
            The pairs, as tuples.

        Examples
        --------
        >>> [(int(n), int(x)) for n, x in ms.data.Dataset.range(4).skip(2).enumerate(start=1)]
        [(1, 2), (2, 3)]
        >>> [(int(n), x.tolist()) for n, x in ms.data.Dataset.range(3).batch(2).enumerate()]
        [(0, [0, 1]), (1, [2])]
        """
        start = as_integer("start", start)
        if self._pipeline.batch is not None:
            return self._then(Enumerate(start))
        _, structure = nests.flatten((0, 0))
        return self._from(Zipped(structure, [Pipeline(CountSource(start)), self._pipeline]))

    def sample(self, weights: Any, num_examples: int | None = None, seed: int = 0) -> Self:
        """Return elements drawn with replacement, by weight, for example to balance classes. Local.

        The draws depend only on `seed`, the epoch and the repetition. Elements are returned in the
        order in which they are drawn. A `shuffle` after it reads compressed files faster, because
        it reads by chunks.

        Parameters
        ----------
        weights : sequence of float
            One weight per element; they need not sum to 1. All ranks must pass the same.
        num_examples : int, optional
            Number of draws per epoch; ``None``: as many as there are elements.
        seed : int
            Seed of the draws, at least 0.

        Returns
        -------
        Dataset
            The elements that are drawn.

        Raises
        ------
        TypeError, ValueError
            If a weight is negative or not finite, if none is positive, if there is not one weight
            per element (for files on first use), or if the length is not known, or endless.

        Examples
        --------
        >>> label = np.array([0] * 90 + [1] * 10)
        >>> weights = 1 / np.bincount(label)[label]
        >>> balanced = ms.data.Dataset.from_arrays(label).sample(weights, num_examples=1000)
        >>> 400 < sum(balanced) < 600
        np.True_
        """
        if num_examples is not None:
            num_examples = as_integer("num_examples", num_examples, 0)
        found = Weights(weights, num_examples, as_integer("seed", seed, 0))
        _check_finite("sample", self._pipeline)
        if self._pipeline.batch is not None:
            return self._then(SampleBatches(found))
        return self._from(Sampled(self._pipeline, found))

    def _from(self, view: View) -> Self:
        return type(self)(Pipeline(view_or_stream(view)), self._auto_shard_policy)

    def padded_batch(
        self,
        global_batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = 0,
        drop_remainder: bool = False,
    ) -> Self:
        """Return the elements in batches, all padded to the same shape. Local.

        Parameters
        ----------
        global_batch_size, drop_remainder : int, bool
            As in `batch`.
        padded_shapes : nest of tuples of int or None, optional
            The shape of each leaf; a tuple of integers is one shape. A length of ``None`` (or -1)
            means the length of the longest element in this rank's slice of the batch. Pass numbers
            if you gather the slices. Without `padded_shapes`, every length that differs is padded
            to the longest.
        padding_values : scalar or nest of scalars
            The value to pad with: one for all leaves, or one per leaf. With 0, strings are padded
            with empty strings.

        Returns
        -------
        Dataset
            The padded batches.

        Raises
        ------
        TypeError, ValueError
            As `batch` does; on first use, if a shape or a value does not fit the elements.
        DataError
            While iterating, if an element is longer than its padded shape.

        Examples
        --------
        >>> spec = ms.data.ArraySpec((None,), "int64")
        >>> rows = ms.data.Dataset.from_generator(lambda: map(np.array, ([1], [2, 3])), spec)
        >>> next(iter(rows.padded_batch(2, padding_values=-1))).tolist()
        [[1, -1], [2, 3]]
        """
        options = padded_shapes, padding_values
        return self._batched(PaddedBatch, global_batch_size, drop_remainder, *options)

    def ragged_batch(self, global_batch_size: int, drop_remainder: bool = False) -> Self:
        """Return the elements in batches in which each element keeps its length. Local.

        A leaf becomes a `Ragged` if its lengths may differ, that is, if its spec has a ``None``.
        After a `map`, every leaf with at least one dimension becomes a `Ragged`. Other leaves are
        stacked.

        Parameters
        ----------
        global_batch_size, drop_remainder : int, bool
            As in `batch`.

        Returns
        -------
        Dataset
            The batches.

        Raises
        ------
        TypeError, ValueError
            As `batch` does.
        DataError
            While iterating, if elements differ in a dimension after the first.

        Examples
        --------
        >>> spec = ms.data.ArraySpec((None,), "int64")
        >>> rows = ms.data.Dataset.from_generator(lambda: map(np.array, ([1], [2, 3])), spec)
        >>> next(iter(rows.ragged_batch(2)))
        Ragged(array([1, 2, 3]), row_splits=array([0, 1, 3]))
        """
        return self._batched(RaggedBatch, global_batch_size, drop_remainder)

    def unbatch(self) -> Self:
        """Return the elements of batches, or the rows of elements that are arrays. Local.

        After `batch`, `padded_batch` or `ragged_batch` it undoes the last of these calls, with its
        padding, even if `shuffle`, `take`, `select` or similar calls are in between. A `map` of the
        batches then gets batches of one example, and must keep their length.

        If the dataset is not batched, the rows of each element become elements, for example the
        frames of recordings in several datasets of a file (``"run_*/frame"``). All leaves of an
        element must be arrays of the same length, which may differ between elements. A later
        `shuffle` mixes the rows of as many elements as fit into its window, and reads each element
        about once. If neither the spec nor the file has the lengths, as after `map`, the ranks
        count the rows together when the dataset is distributed: each element is created a second
        time for that. So such a `map` must not draw random numbers; put a random `map` after
        `unbatch`.

        Returns
        -------
        Dataset
            The elements or rows, one by one.

        Raises
        ------
        ValueError
            If the batches were enumerated, or the elements are not arrays.
        DataError
            On first use, if the arrays of one element differ in length.

        Examples
        --------
        >>> pairs = ms.data.Dataset.range(5).batch(2).map(lambda x: 10 * x)
        >>> [int(x) for x in pairs.unbatch()]
        [0, 10, 20, 30, 40]
        >>> recordings = ms.data.Dataset.from_arrays(np.arange(6).reshape(2, 3))
        >>> [int(x) for x in recordings.unbatch()]
        [0, 1, 2, 3, 4, 5]
        """
        pipeline = self._pipeline
        batch = pipeline.batch
        if batch is None:
            return self._from(Rows(pipeline))
        place = max(n for n, each in enumerate(pipeline.transformations) if each is batch)
        later = pipeline.transformations[place + 1 :]
        refuse_numbered(later)
        if not all(isinstance(each, SameOrder) for each in later):
            return self._then(Unbatch(batch.batch_size, batch.drop_remainder))
        whole = (WholeBatches(batch.batch_size),) if batch.drop_remainder else ()
        earlier = pipeline.transformations[:place]
        steps = (*earlier, *whole, *map(wrapped, later))
        return type(self)(
            Pipeline(pipeline.source, steps, pipeline.branch), self._auto_shard_policy
        )

    def flat_map(
        self, fn: Callable[..., Any], seed: int = 0, num_parallel_calls: int | None = None
    ) -> Self:
        """Return the rows of the arrays that `fn` returns: ``map(fn).unbatch()``. Local.

        Parameters
        ----------
        fn : callable
            Takes an element, like a function passed to `map`, and returns a nest of arrays of the
            same length. It is called a second time for each element, to count the rows.
        seed, num_parallel_calls : int, int or None
            As in `map`.

        Returns
        -------
        Dataset
            The rows, one by one.

        Raises
        ------
        TypeError, ValueError
            As `map` does; and if the dataset is batched: call it before ``batch``.
        DataError
            While iterating, if the arrays of one element differ in length.

        Examples
        --------
        >>> pairs = ms.data.Dataset.range(3).flat_map(lambda n: np.array([n, 10 * n]))
        >>> [int(x) for x in pairs]
        [0, 0, 1, 10, 2, 20]
        """
        if self._pipeline.batch is not None:
            raise ValueError(
                "flat_map takes examples, but this dataset is batched. Call it before batch."
            )
        return self.map(fn, seed, num_parallel_calls).unbatch()

    def cache(self, memory: int | str = "4 GiB") -> Self:
        """Return the same elements, kept in memory once they have been read and mapped. Local.

        The elements are read, decoded and mapped once, and taken from memory afterwards: in later
        epochs, and by other ranks of the node, which share the memory. Each node keeps one copy
        of an element. The operating system frees the memory when the last process that uses it
        exits.

        Only the content of elements is kept, so a `shuffle` still reshuffles every epoch, before or
        after `cache`. A random `map` before `cache` runs once, with the random numbers of the
        first epoch, so every epoch repeats the same augmentation: put it after `cache`.

        Parameters
        ----------
        memory : int or str
            The most memory that a node may use, in bytes or as a size such as ``"512 MiB"``.

        Returns
        -------
        Dataset
            The same elements.

        Raises
        ------
        TypeError, ValueError
            If `memory` is not a size. If the dataset is batched, because a rank's part of a batch
            depends on the number of ranks: call ``cache`` before ``batch``. On first use, if each
            epoch has different elements, as after ``sample``.
        MemoryError
            If the elements need more memory. If sizes are known, when the dataset is distributed
            or iterated; otherwise at the first element that does not fit. The message says how
            much is needed.
        DataError
            While iterating, if a leaf of an element is not an array, a number or a string.

        Examples
        --------
        >>> squares = ms.data.Dataset.range(4).map(lambda x: x * x).cache("1 MiB")
        >>> [int(x) for x in squares], [int(x) for x in squares.skip(2)]
        ([0, 1, 4, 9], [4, 9])
        """
        num_bytes = size_in_bytes(memory)
        pipeline = self._pipeline
        if pipeline.batch is not None:
            raise ValueError(
                "cache stores examples, but this dataset is batched, and a rank's part of a batch "
                "depends on the number of ranks. Call cache before batch."
            )
        orders = tuple(e for e in pipeline.transformations if not isinstance(e, Map))
        source = Cached(pipeline, num_bytes, len(orders))
        return type(self)(Pipeline(source, orders, pipeline.branch), self._auto_shard_policy)

    def ignore_errors(self, log_warning: bool = True) -> Self:
        """Return the elements without those that raise an error when read or mapped. Local.

        These may be damaged images, which a function passed to `map` cannot decode, or rows of a
        damaged chunk of a file. As with `filter`, the ranks find these elements together, once,
        when the dataset is first distributed. So batches are full, and positions and lengths are
        exact and the same on any number of ranks. The search takes one pass over the data. A
        `cache` before it keeps the result: ``map(decode).cache().ignore_errors()`` decodes once.

        A `map` that draws from `example_rng` is tried with the random numbers of the first epoch.
        Errors in later epochs are raised, and so are errors of a `map` after `ignore_errors`.
        `MemoryError` is never ignored.

        Parameters
        ----------
        log_warning : bool
            Whether rank 0 logs a warning to the logger ``mpistrat`` that says how many elements
            are left out and lists the first ones with their errors.

        Returns
        -------
        Dataset
            The elements that raise no error.

        Raises
        ------
        TypeError
            If `log_warning` is not a bool.
        ValueError
            If the dataset is batched: call it before ``batch``. Also if its length is unknown, as
            for a generator.

        Examples
        --------
        >>> inverse = ms.data.Dataset.range(3).map(lambda x: 1 // int(x))
        >>> [int(x) for x in inverse.ignore_errors(log_warning=False)]
        [1, 0]
        """
        logs = as_bool("log_warning", log_warning)
        if self._pipeline.batch is not None:
            raise ValueError(
                "ignore_errors leaves out examples, but this dataset is batched. Call it before "
                "batch, after the map that may fail."
            )
        if self._pipeline.source.is_stream:
            raise ValueError(
                "ignore_errors looks for elements without errors before the first epoch, so their "
                "number must be known. Let the generator skip elements that it cannot create."
            )
        return self._from(ValidElements(self._pipeline.tolerant(), logs))


def pipeline_of(dataset: Dataset) -> Pipeline:
    """Return the source of a dataset and its transformations."""
    return dataset._pipeline


def policy_of(dataset: Dataset) -> AutoShardPolicy:
    """Return how the ranks divide a dataset."""
    return dataset._auto_shard_policy


def _unbatched(name: str, dataset: Any) -> Pipeline:
    """Return the pipeline of `dataset`, which must not be batched."""
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{name} needs datasets, not {dataset!r}.")
    if dataset._pipeline.batch is not None:
        raise ValueError(
            f"{name} is for datasets of single elements, because which part of a batch a rank "
            f"holds depends on the number of ranks: call {name} first, and batch its result."
        )
    return dataset._pipeline


def _check_finite(name: str, pipeline: Pipeline) -> None:
    if pipeline.source.is_stream:
        raise ValueError(
            f"{name} needs to know the number of elements, which is unknown for a generator. "
            "Use from_source, or range(n).map(load)."
        )
    if pipeline.source.is_read and pipeline.length < 0:
        raise ValueError(f"{name} needs a dataset that ends: call it before repeat.")


def _check_specs(view: Concatenated | Mixed) -> None:
    """Raise DataError if specs differ, if they are known without reading or calling anything."""
    if view.is_read and not view.num_maps:
        _ = view.element_spec
