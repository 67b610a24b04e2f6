"""Transformations of elements of the public API: batches of different shapes, cache, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat.arguments import as_bool
from mpistrat.data.batching import Unbatch, WholeBatches, refuse_numbered, wrapped
from mpistrat.data.cache import Cached, size_in_bytes
from mpistrat.data.combinations import Combinations
from mpistrat.data.errors import Sound
from mpistrat.data.padded_batch import PaddedBatch, RaggedBatch
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.rows import Rows
from mpistrat.data.transforms import Map, SameOrder

if TYPE_CHECKING:
    from typing_extensions import Self


class ElementTransformations(Combinations):
    """The methods of `Dataset` that make batches in other ways, keep elements or leave them out."""

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
            If `memory` is no size; if the data set is batched, because what a rank would keep
            depended on the number of ranks: call ``cache`` before ``batch``; on first use, if the
            data set has other elements in each pass, as after ``sample``.
        MemoryError
            If the elements need more: when the data set is distributed or iterated where sizes are
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
        which these are, when the data set is first distributed: the ranks share the work, and
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
            If the data set is batched: call it before ``batch``; or if its length is unknown, as of
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
        return self._from(Sound(self._pipeline.tolerant(), logs))
