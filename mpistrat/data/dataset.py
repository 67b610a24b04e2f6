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
    """Decorate `shuffle` so that calls as of tf.data raise an error that says what to do."""

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

    Each transformation returns a new dataset and leaves this one as it is. Nothing is read
    before the first use. Iterating gives nests of NumPy arrays; each iteration is a pass, counted
    from 0. The default strategy distributes nothing and hands out the dataset itself, so it has
    a position to be saved, as a `DistributedDataset` has.

    Make one with `from_hdf5`, `from_arrays`, `from_source`, `from_generator` or `range`, or of
    others with `zip` or `sample_from_datasets`.

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
            The files of a pattern are sorted by name, a list keeps its order.
        fields : str, Field, or a tuple or dict of them, optional
            Paths of the datasets to read, all of one length, or `Field`. An example has the same
            structure: an array, a tuple, or a dict with the given labels. A path with ``*``
            makes an example of each match, and one to compound rows a dict of their members.
            ``None`` takes every top-level dataset that can be read, as a dict, and names the
            others in a warning.
        swmr : bool
            Whether the files are being written, by a program that has set ``swmr_mode``. The
            number of examples is that of the first use, or of the call that distributes them.

        Raises
        ------
        TypeError, ValueError
            If an argument has another form.
        DataError
            On first use, if a file is missing or damaged, a field is missing or does not fit
            the others, or there are no examples.
        """
        return cls(Pipeline(Hdf5Source(files, fields, as_bool("swmr", swmr))))

    @classmethod
    def from_arrays(cls, nest: Any) -> Dataset:
        """Return the rows of the arrays in `nest`, all of one length. Local.

        All ranks must pass the same arrays. `Strategy.distribute_dataset` compares digests of them.

        Raises
        ------
        TypeError
            For datasets of h5py, and arrays of zarr, dask and xarray, which would be read whole
            on every rank: use `from_hdf5` or `from_source`.
        DataError
            If there is no array, one is 0-d or masked, or lengths differ.
        """
        refuse_lazy_arrays(nest)
        return cls(Pipeline(ArraySource(nest)))

    @classmethod
    def from_source(cls, source: Any, thread_safe: bool = True) -> Dataset:
        """Return the examples of any object with a length and examples by number. Local.

        For example a zarr or dask array, a table of a data base, or a folder of files. Each rank
        reads the examples of its slices, ahead of their use and in threads. All ranks need a
        source of the same examples.

        Parameters
        ----------
        source : object
            With ``__len__``, and either ``__getitem__(number)``, which returns one example, or
            ``read(numbers)``, which takes an int64 array and returns the nest of arrays stacked.
            Optional attributes: `chunk_rows`, an integer or the first row of each chunk, tells
            which examples are read together best: then each chunk is read whole, in one call, and
            about once in a shuffled pass. `element_spec` is the nest of `ArraySpec` of an example,
            with ``None`` for lengths that differ; without it all examples have the shapes and
            dtypes of the first one.
        thread_safe : bool
            Whether several threads may call `source` at a time. Otherwise one does.

        Raises
        ------
        TypeError
            If `source` has not these methods.
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
        """Return the elements of ``fn()``, which is called again for each pass. Local.

        Every rank runs all of it, because a generator cannot be split before it has run: `fn`
        must give the same elements on all ranks.

        Parameters
        ----------
        fn : callable
            Takes nothing, returns an iterable.
        element_spec : nest of ArraySpec
            Of one element. Values are cast within their kind where they survive: integers are
            in range, strings are not cut, numbers do not become infinite.

        Raises
        ------
        TypeError
            If `fn` is not callable or `element_spec` is no nest of `ArraySpec`.
        DataError
            While iterating, if an element does not fit `element_spec`, or if `fn` returns no
            iterable, or the iterator that it has returned before.
        """
        return cls(Pipeline(GeneratorSource(fn, element_spec)))

    @classmethod
    def range(cls, n: int) -> Dataset:
        """Return the integers 0 to `n` - 1, as int64. Local."""
        return cls(Pipeline(RangeSource(as_integer("n", n, 0, maximum=2**63 - 1))))

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element. Where there is a map, one example is read.

        Local.
        """
        return self._pipeline.element_spec

    def cardinality(self) -> int:
        """Return the number of elements; -1 for endless, -2 for unknown. Local."""
        return self._pipeline.length

    def __iter__(self) -> ElementIterator:
        pass_number, start, on_step = self._position.begin()
        elements = self._pipeline.elements(pass_number, start)
        on_batch = None if self._pipeline.batch is None else note_batch
        return ElementIterator(elements, on_step, of=self, on_element=on_batch)

    def __repr__(self) -> str:
        return f"<Dataset {self._pipeline}{self._position}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as that of a `DistributedDataset` with the same batches. Local."""
        return self._position.state(position_layout(self._pipeline))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, as a `DistributedDataset` does. Local.

        Raises
        ------
        TypeError, ValueError
            If it is no position, or one within a pass that this dataset does not have.
        """
        self._position.load(state, position_layout(self._pipeline), self._pipeline.length)

    @_refuse_buffer_size
    def shuffle(
        self, seed: int, reshuffle_each_iteration: bool = True, window: int | None = None
    ) -> Self:
        """Return the elements in random order. Local.

        The order depends on the files, `seed`, the pass and the batch size alone.

        A pass over files interleaves L partitions of the chunks: each fills a fixed part of every
        batch. On N ranks, a chunk is decoded about once over the whole job where N divides L, up
        to twice on average where N is smaller otherwise, and about N / L times where N is larger.
        L is at most an eighth of the number of chunks (half of it up to 4 partitions), half the
        number of chunks in the window, the batch size, and one for every 64 examples. The chunks
        are those of the field with the largest rows; longer chunks of another field are decoded
        by every rank that needs a row of one.

        Parameters
        ----------
        seed : int
        reshuffle_each_iteration : bool
            Whether each pass, and each repetition within it, has its own order.
        window : int, optional
            How many elements are mixed at a time. ``None``: for files as many as need about
            100 MB, else all. The chunks of files come in random order whatever the window;
            other elements stay within their window.

        Raises
        ------
        TypeError, ValueError
            If `seed` is no integer of at least 0, `window` none of at least 1, or
            `reshuffle_each_iteration` no bool; and for `buffer_size`, an argument of tf.data.
        """
        window = None if window is None else as_integer("window", window, 1)
        reshuffles = as_bool("reshuffle_each_iteration", reshuffle_each_iteration)
        return self._then(Shuffle(as_integer("seed", seed, 0), reshuffles, window))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> Self:
        """Return the elements in batches: arrays with one more dimension in front. Local.

        Batches can be batched again, for example for several steps at a time. The batches of the
        last call are the global ones, which ranks divide. The batches within one must be equally
        long, so let all calls but the last drop the remainder.

        Parameters
        ----------
        global_batch_size : int
            Elements in a batch, over all replicas together.
        drop_remainder : bool
            Whether a last batch that is shorter is left out.

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
        """Return the elements in the batches that `make` makes of checked arguments."""
        size = as_integer("global_batch_size", batch_size, 1)
        return self._then(make(size, as_bool("drop_remainder", drop_remainder), *options))

    def map(
        self, fn: Callable[..., Any], seed: int = 0, num_parallel_calls: int | None = None
    ) -> Self:
        """Return `fn` of each element. Local.

        Before `batch`, `fn` gets one example; after it, this rank's slice of the batch, which
        may have the length 0. A tuple is passed as several arguments. `fn` must be pure: how
        often and in which order it is called is not defined. Random numbers it takes from
        `mpistrat.data.example_rng`, so that they depend on the example and not on the rank.

        Where `fn` comes before `batch`, all examples get the dtype of the first one of the data
        set, as it is without shuffling, whatever the number of ranks; strings are at least as wide
        as those of the source.

        Parameters
        ----------
        fn : callable
        seed : int
            Of `example_rng` and `example_rngs` in `fn`.
        num_parallel_calls : int, optional
            In how many threads `fn` is called, which helps where it leaves Python, as decoders and
            NumPy do. The order stays, at most twice as many results wait, and an error cancels
            what comes after it. ``None``: one call at a time, in the thread of the iterator; -1
            (`mpistrat.data.AUTOTUNE`): this rank's share of the cores.

        Raises
        ------
        TypeError, ValueError
            If `fn` is not callable, `seed` no integer of at least 0, or `num_parallel_calls` none
            of at least 1.
        DataError
            While iterating, if the results for a batch do not stack, or do not fit the dtype of
            the first one.
        """
        if not callable(fn):
            raise TypeError(f"map needs a function, not {fn!r}.")
        seed = as_integer("seed", seed, 0)
        if num_parallel_calls is not None and num_parallel_calls != AUTOTUNE:
            num_parallel_calls = as_integer("num_parallel_calls", num_parallel_calls, 1)
        return self._then(Map(fn, seed, num_parallel_calls))

    def repeat(self, count: int | None = None) -> Self:
        """Return the elements `count` times over; endlessly for ``None`` or -1. Local."""
        if count is not None:
            count = as_integer("count", count, -1)
        return self._then(Repeat(None if count == -1 else count))

    def take(self, n: int) -> Self:
        """Return the first `n` elements. Local."""
        return self._then(Take(as_integer("n", n, 0)))

    def skip(self, n: int) -> Self:
        """Return the elements after the first `n`. Local."""
        return self._then(Skip(as_integer("n", n, 0)))

    def shard(self, num_shards: int, index: int) -> Self:
        """Return every `num_shards`-th element, from element `index` on. Local.

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
        """Return the same elements, of which a thread prepares up to `n` ahead. Local.

        Wherever it stands, it is the elements at the end that are prepared. Functions given to
        `map` run in that thread.
        """
        return self._then(Prefetch(as_integer("n", n, 1)))

    def with_options(self, *, auto_shard_policy: AutoShardPolicy) -> Self:
        """Return the same elements, to be divided among ranks in another way. Local.

        Raises
        ------
        TypeError
            If `auto_shard_policy` is no `AutoShardPolicy`.
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
        """Return nests of the elements of several datasets, as long as the shortest. Local.

        Each dataset keeps its own reader. A shuffle afterwards shuffles all alike, and still
        reads files by chunks: those of the dataset with the largest elements.

        Parameters
        ----------
        datasets : nest of Dataset
            An element has the same structure: a tuple, a dict, or nests of them.

        Raises
        ------
        TypeError
            If a leaf of the nest is no dataset.
        ValueError
            If there is none, or one is batched: batch the zipped dataset.

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
            raise ValueError("zip needs at least one data set, but the nest is empty.")
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
        """Return a mixture of data sets: each element is the next one of one of them. Local.

        Which dataset comes next is drawn from `seed` alone: it is the same in each pass. Let the
        datasets shuffle their elements.

        Parameters
        ----------
        datasets : list of Dataset
            Of one `element_spec`, not batched.
        weights : sequence of float, optional
            How often each is drawn from; ``None``: all alike.
        seed : int
        stop_on_empty : bool
            Whether the mixture ends where a dataset is drawn from that has no more elements.
            Otherwise it is left out from then on, and the mixture ends with the last one.

        Raises
        ------
        TypeError, ValueError
            If an argument has another form, or there is not one weight for each dataset.
        DataError
            If specs differ; at the latest on first use.

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
            raise ValueError("sample_from_datasets needs at least one data set.")
        weights = np.ones(len(children)) if weights is None else weights
        weights = checked_weights("sample_from_datasets", weights)
        if len(weights) != len(children):
            raise ValueError(
                f"sample_from_datasets needs a weight for each of {len(children)} data sets, not "
                f"{len(weights)}."
            )
        stops = as_bool("stop_on_empty", stop_on_empty)
        view = Mixed(children, weights, as_integer("seed", seed, 0), stops)
        _check_specs(view)
        return cls(Pipeline(view_or_stream(view)), policy_of(next(iter(datasets))))

    def concatenate(self, other: Dataset) -> Self:
        """Return the elements of this data set, then those of `other`. Local.

        Parameters
        ----------
        other : Dataset
            Of the same `element_spec`; lengths that differ become ``None``. Not batched.

        Raises
        ------
        TypeError
            If `other` is no dataset.
        ValueError
            If one of the two is batched.
        DataError
            If specs differ; at the latest on first use.

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

        A shuffle afterwards still reads files by chunks. Without one, elements are read in the
        order of `indices`: sort them where that order does not matter.

        Parameters
        ----------
        indices : sequence of int, or of bool
            Numbers of elements as in NumPy: negative ones count from the end, and one may come
            several times. Or a mask with an entry for each element. All ranks need the same.

        Raises
        ------
        TypeError
            If they are neither integers nor bools, or not one-dimensional.
        IndexError
            If a number is out of range, or a mask has another length; for files on first use.
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

        Which ones these are is found once, on first use: where the dataset is distributed, each
        rank evaluates a share, and all agree. (In `distribute_datasets_from_function`, and where
        a program iterates over the dataset itself, one rank evaluates it alone.) So `fn` sees
        elements that `map` made before, but these may not be random. The number of elements is
        known afterwards, and a shuffle still reads files by chunks.

        Parameters
        ----------
        fn : callable
            Takes an element, a tuple as several arguments; returns a truth value.
        fields : str, int, or list of them, optional
            Labels of a dict, or positions in a tuple: `fn` gets these alone, and only they are
            read.

        Raises
        ------
        TypeError
            If `fn` is not callable.
        ValueError
            After `batch` or `repeat`; on first use if a map before it uses `example_rng`, if the
            elements are others in each pass, or an element has no such field.

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

        Windows that would be shorter are left out. A shuffle afterwards reads files by chunks;
        windows that overlap find their chunks decoded.

        Parameters
        ----------
        size : int
            Elements in a window.
        stride : int
            How far the first elements of neighbouring windows are apart. It begins again in each
            file.
        dilation : int
            How far the elements within a window are apart.
        across_files : bool
            Whether a window may begin in one file of `from_hdf5` and end in the next.

        Raises
        ------
        TypeError, ValueError
            If an argument is no integer of at least 1, or no bool; after `batch`; and where it
            depends on the pass which elements are of one file.
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

        Numbers are int64 and count the elements as this dataset has them, shuffled or not. After
        `batch` they count global batches: then the number has no dimension, and all ranks get it.

        Parameters
        ----------
        start : int
            The first number.

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
        """Return elements drawn with replacement, by weight: to balance classes. Local.

        The draws depend on `seed`, the pass and the repetition alone. They come in the order in
        which they are drawn; of compressed files they are read faster if `shuffle` follows, which
        reads by chunks.

        Parameters
        ----------
        weights : sequence of float
            One for each element; they need not sum to 1. All ranks need the same.
        num_examples : int, optional
            How many to draw; ``None``: as many as there are elements.
        seed : int

        Raises
        ------
        TypeError, ValueError
            If a weight is negative or not finite, none is positive, or there is not one for each
            element (for files on first use); if the length is not known, or endless.

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
        """Return the elements in batches, each filled up to one shape. Local.

        Parameters
        ----------
        global_batch_size, drop_remainder : int, bool
            As those of `batch`.
        padded_shapes : nest of tuples of int or None, optional
            The shape of each leaf; a tuple of integers is one shape. ``None`` (or -1) for a length
            is that of the longest element in this rank's slice of the batch, so give lengths
            where slices are gathered. Without `padded_shapes` all lengths that differ are those
            of the longest.
        padding_values : scalar or nest of scalars
            What fills up: one for all, or one for each leaf. Text is filled up with empty text.

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
        """Return the elements in batches that keep the length of each. Local.

        Each leaf whose lengths may differ, which are those with ``None`` in its spec, and after a
        `map` all that have a dimension, becomes a `Ragged`. The others are stacked.

        Parameters
        ----------
        global_batch_size, drop_remainder : int, bool
            As those of `batch`.

        Raises
        ------
        TypeError, ValueError
            As `batch` does.
        DataError
            While iterating, if elements differ in another dimension than the first.

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

        After `batch`, `padded_batch` or `ragged_batch` it undoes the last of them, padding too,
        also if `shuffle`, `take`, `select` or the like stand between. A `map` of the batches gets
        batches of one example from now on, whose length it must keep.

        Without a batch, the rows of each element become elements: all leaves are arrays of one
        length, which may differ from element to element, such as the frames of recordings in
        several datasets of a file (``"run_*/frame"``). A shuffle afterwards mixes the rows of
        several elements, as many as its window holds, and reads each element about once. Where
        neither specs nor files tell the lengths, as after `map`, each element is made a second
        time, to count its rows, when the dataset is distributed: the ranks share the work. So such
        a `map` may not draw random numbers; map at random after `unbatch`.

        Raises
        ------
        ValueError
            If batches were enumerated, or elements are no arrays.
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
        """Return the rows of what `fn` makes of each element, as ``map(fn).unbatch()``. Local.

        Parameters
        ----------
        fn : callable
            Takes an element, as a function given to `map`, and returns a nest of arrays of one
            length. It is called a second time for each element, to count the rows.
        seed, num_parallel_calls : int, int or None
            As those of `map`.

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
        """Return the same elements, kept in memory once they have been made. Local.

        What comes out here, decoded and mapped, is made once and taken from memory afterwards:
        in later passes, and by other ranks of the node, which share the memory. An element is kept
        once a node. The system takes the memory back when the last process that uses it ends.

        Only what an element contains is kept: a `shuffle`, before or after it, still shuffles
        each pass. A `map` before it that draws from `example_rng` is frozen: each example keeps
        what it got with the random numbers of the first pass. Map at random after `cache`.

        Parameters
        ----------
        memory : int or str
            The most bytes that a node keeps, such as ``"512 MiB"``.

        Raises
        ------
        TypeError, ValueError
            If `memory` is no size; if the dataset is batched, because what a rank would keep
            depended on the number of ranks: call ``cache`` before ``batch``; on first use, if the
            dataset has other elements in each pass, as after ``sample``.
        MemoryError
            If the elements need more: when the dataset is distributed or iterated where sizes are
            known, else at the first element that does not fit, with the sum that is needed.
        DataError
            While iterating, if a leaf of an element is neither array, number nor text.

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
                "cache keeps examples, but this data set is batched: what a rank would keep of a "
                "batch depended on the number of ranks. Call cache before batch."
            )
        orders = tuple(e for e in pipeline.transformations if not isinstance(e, Map))
        source = Cached(pipeline, num_bytes, len(orders))
        return type(self)(Pipeline(source, orders, pipeline.branch), self._auto_shard_policy)

    def ignore_errors(self, log_warning: bool = True) -> Self:
        """Return the elements that can be made, without those where that raises an error. Local.

        Such elements are, for example, those with a damaged image, which a function given to `map`
        cannot decode, and rows of a damaged chunk of a file. As with `filter`, it is found once
        which these are, when the dataset is first distributed: the ranks share the work, and
        agree. So batches are full, positions and lengths are exact, and all of it is the same at
        any number of ranks. That takes a pass over the data, which a `cache` before it keeps:
        ``map(decode).cache().ignore_errors()`` decodes once.

        A `map` that draws from `example_rng` is tried with the random numbers of the first pass. An
        error in a later pass is raised, and so is an error of a `map` after it. `MemoryError` is
        never ignored.

        Parameters
        ----------
        log_warning : bool
            Whether rank 0 warns how many elements are left out, and names the first ones with their
            errors, by the logger ``mpistrat``.

        Raises
        ------
        TypeError
            If `log_warning` is no bool.
        ValueError
            If the dataset is batched: call it before ``batch``; or if its length is unknown, as of
            a generator.

        Examples
        --------
        >>> inverse = ms.data.Dataset.range(3).map(lambda x: 1 // int(x))
        >>> [int(x) for x in inverse.ignore_errors(log_warning=False)]
        [1, 0]
        """
        logs = as_bool("log_warning", log_warning)
        if self._pipeline.batch is not None:
            raise ValueError(
                "ignore_errors leaves out examples, but this data set is batched. Call it before "
                "batch, after the map that may fail."
            )
        if self._pipeline.source.is_stream:
            raise ValueError(
                "ignore_errors finds the elements that can be made before the first pass, so their "
                "number must be known. Let the generator leave out what it cannot make."
            )
        return self._from(ValidElements(self._pipeline.tolerant(), logs))


def pipeline_of(dataset: Dataset) -> Pipeline:
    """Return the source of a dataset and its transformations."""
    return dataset._pipeline


def policy_of(dataset: Dataset) -> AutoShardPolicy:
    """Return how a dataset is to be divided among ranks."""
    return dataset._auto_shard_policy


def _unbatched(name: str, dataset: Any) -> Pipeline:
    """Return the pipeline of `dataset`, which must not be batched."""
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{name} needs data sets, not {dataset!r}.")
    if dataset._pipeline.batch is not None:
        raise ValueError(
            f"{name} is for data sets of single elements, because which part of a batch a rank "
            f"holds depends on the number of ranks: call {name} first, and batch its result."
        )
    return dataset._pipeline


def _check_finite(name: str, pipeline: Pipeline) -> None:
    if pipeline.source.is_stream:
        raise ValueError(
            f"{name} needs to know how many elements there are, which of a generator nobody does. "
            "Use from_source, or range(n).map(load)."
        )
    if pipeline.source.is_read and pipeline.length < 0:
        raise ValueError(f"{name} needs a data set that ends: call it before repeat.")


def _check_specs(view: Concatenated | Mixed) -> None:
    """Raise DataError where specs differ, if they are known without reading or calling anything."""
    if view.is_read and not view.num_maps:
        _ = view.element_spec
