"""Transformations of the public API: each returns a new data set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.batching import Batch
from mpistrat.data.order import Transformation
from mpistrat.data.parallel_map import AUTOTUNE
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.transforms import Map, Prefetch, Repeat, Shard, Skip, Take
from mpistrat.options import AutoShardPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

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


class Transformations:
    """The methods of `Dataset` that return another data set."""

    def __init__(
        self, pipeline: Pipeline, auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    ) -> None:
        self._pipeline = pipeline
        self._auto_shard_policy = auto_shard_policy

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
            If `global_batch_size` is no integer of at least 1, or `drop_remainder` no bool.
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
