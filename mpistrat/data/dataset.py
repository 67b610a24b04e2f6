"""Data set of the public API: a lazy pipeline of transformations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.fingerprint import position_layout
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.data.iterators import ElementIterator, Position
from mpistrat.data.order import Transformation
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.sources import ArraySource, GeneratorSource, RangeSource
from mpistrat.data.transforms import Batch, Map, Prefetch, Repeat, Shard, Skip, Take
from mpistrat.options import AutoShardPolicy

__all__ = ["Dataset"]


class Dataset:
    """Examples, or batches of them, in a fixed order.

    Each transformation returns a new data set and leaves this one as it is. Nothing is read
    before the first use. Iterating gives nests of NumPy arrays; each iteration is a pass, counted
    from 0. The default strategy distributes nothing and hands out the data set itself, so it has
    a position to be saved, as a `DistributedDataset` has.

    Make one with `from_hdf5`, `from_arrays`, `from_generator` or `range`.

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
        fields: str | tuple[str, ...] | list[str] | dict[str, str] | None = None,
    ) -> Dataset:
        """Return the examples of HDF5 files, one file after the other. Local.

        Parameters
        ----------
        files : path, list of paths, or glob pattern
            The files of a pattern are sorted by name, a list keeps its order.
        fields : str, tuple of str, or dict of str, optional
            Paths of the data sets to read, all of one length. An example has the same
            structure: an array, a tuple, or a dict with the given labels. ``None`` takes every
            top-level data set, as a dict.

        Raises
        ------
        TypeError, ValueError
            If an argument has another form.
        DataError
            On first use, if a file is missing or damaged, a field is missing or does not fit
            the others, or there are no examples.
        """
        return cls(Pipeline(Hdf5Source(files, fields)))

    @classmethod
    def from_arrays(cls, nest: Any) -> Dataset:
        """Return the rows of the arrays in `nest`, all of one length. Local.

        All ranks must pass the same arrays: their contents are not compared.

        Raises
        ------
        DataError
            If there is no array, one is 0-d or masked, or lengths differ.
        """
        return cls(Pipeline(ArraySource(nest)))

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

    def shuffle(
        self, seed: int, reshuffle_each_iteration: bool = True, window: int | None = None
    ) -> Dataset:
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
            `reshuffle_each_iteration` no bool.
        """
        window = None if window is None else as_integer("window", window, 1)
        reshuffles = as_bool("reshuffle_each_iteration", reshuffle_each_iteration)
        return self._then(Shuffle(as_integer("seed", seed, 0), reshuffles, window))

    def batch(self, global_batch_size: int, drop_remainder: bool = False) -> Dataset:
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
            If `global_batch_size` is no integer of at least 1, or `drop_remainder` no bool.
        DataError
            While iterating, if a batch would hold batches of different lengths.
        """
        batch_size = as_integer("global_batch_size", global_batch_size, 1)
        return self._then(Batch(batch_size, as_bool("drop_remainder", drop_remainder)))

    def map(self, fn: Callable[..., Any], seed: int = 0) -> Dataset:
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

        Raises
        ------
        TypeError, ValueError
            If `fn` is not callable, or `seed` no integer of at least 0.
        DataError
            While iterating, if the results for a batch do not stack, or do not fit the dtype of
            the first one.
        """
        if not callable(fn):
            raise TypeError(f"map needs a function, not {fn!r}.")
        return self._then(Map(fn, as_integer("seed", seed, 0)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the elements `count` times over; endlessly for ``None`` or -1. Local."""
        if count is not None:
            count = as_integer("count", count, -1)
        return self._then(Repeat(None if count == -1 else count))

    def take(self, n: int) -> Dataset:
        """Return the first `n` elements. Local."""
        return self._then(Take(as_integer("n", n, 0)))

    def skip(self, n: int) -> Dataset:
        """Return the elements after the first `n`. Local."""
        return self._then(Skip(as_integer("n", n, 0)))

    def shard(self, num_shards: int, index: int) -> Dataset:
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

    def prefetch(self, n: int) -> Dataset:
        """Return the same elements, of which a thread prepares up to `n` ahead. Local.

        Wherever it stands, it is the elements at the end that are prepared. Functions given to
        `map` run in that thread.
        """
        return self._then(Prefetch(as_integer("n", n, 1)))

    def with_options(self, *, auto_shard_policy: AutoShardPolicy) -> Dataset:
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
        return Dataset(self._pipeline, auto_shard_policy)

    def _then(self, transformation: Transformation) -> Dataset:
        return Dataset(self._pipeline.then(transformation), self._auto_shard_policy)

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
        return ElementIterator(elements, on_step, of=self)

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
            If it is no position, or one within a pass that this data set does not have.
        """
        self._position.load(state, position_layout(self._pipeline), self._pipeline.length)
