"""Combinations of the public API: data sets that are selected from, put together or numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.batching import Enumerate
from mpistrat.data.combining import Concatenated, Zipped
from mpistrat.data.filtering import Filtered
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.sampling import Mixed, SampleBatches, Sampled, Weights, checked_weights
from mpistrat.data.selecting import Indices, SelectBatches, Selected
from mpistrat.data.sources import CountSource
from mpistrat.data.streams import view_or_stream
from mpistrat.data.transformations import Transformations
from mpistrat.data.transforms import Repeat
from mpistrat.data.views import View
from mpistrat.data.windows import Windowed
from mpistrat.options import AutoShardPolicy

if TYPE_CHECKING:
    from typing_extensions import Self


class Combinations(Transformations):
    """The methods of `Dataset` that stand on other data sets."""

    @classmethod
    def zip(cls, datasets: Any) -> Self:
        """Return nests of the elements of several data sets, as long as the shortest. Local.

        Each data set keeps its own reader. A shuffle afterwards shuffles all alike, and still
        reads files by chunks: those of the data set with the largest elements.

        Parameters
        ----------
        datasets : nest of Dataset
            An element has the same structure: a tuple, a dict, or nests of them.

        Raises
        ------
        TypeError
            If a leaf of the nest is no data set.
        ValueError
            If there is none, or one is batched: batch the zipped data set.

        Examples
        --------
        >>> images = ms.data.Dataset.from_arrays(np.zeros((3, 2)))
        >>> labels = ms.data.Dataset.from_arrays(np.array([5, 6, 7]))
        >>> both = ms.data.Dataset.zip({"image": images, "label": labels})
        >>> [int(element["label"]) for element in both.shuffle(seed=1).take(2)]
        [7, 5]
        """
        leaves, structure = nests.flatten(datasets, atoms=(Transformations,))
        if not leaves:
            raise ValueError("zip needs at least one data set, but the nest is empty.")
        children = [_unbatched("zip", leaf) for leaf in leaves]
        return cls(Pipeline(view_or_stream(Zipped(structure, children))), _policy_of(leaves))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Iterable[Transformations],
        weights: Any = None,
        seed: int = 0,
        stop_on_empty: bool = True,
    ) -> Self:
        """Return a mixture of data sets: each element is the next one of one of them. Local.

        Which data set comes next is drawn from `seed` alone: it is the same in each pass. Let the
        data sets shuffle their elements.

        Parameters
        ----------
        datasets : list of Dataset
            Of one `element_spec`, not batched.
        weights : sequence of float, optional
            How often each is drawn from; ``None``: all alike.
        seed : int
        stop_on_empty : bool
            Whether the mixture ends where a data set is drawn from that has no more elements.
            Otherwise it is left out from then on, and the mixture ends with the last one.

        Raises
        ------
        TypeError, ValueError
            If an argument has another form, or there is not one weight for each data set.
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
        return cls(Pipeline(view_or_stream(view)), _policy_of(datasets))

    def concatenate(self, other: Transformations) -> Self:
        """Return the elements of this data set, then those of `other`. Local.

        Parameters
        ----------
        other : Dataset
            Of the same `element_spec`; lengths that differ become ``None``. Not batched.

        Raises
        ------
        TypeError
            If `other` is no data set.
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
            If the length of the data set is not known, or endless.

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

        Which ones these are is found once, on first use: where the data set is distributed, each
        rank evaluates a share, and all agree. (In `distribute_datasets_from_function`, and where
        a program iterates over the data set itself, one rank evaluates it alone.) So `fn` sees
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

        Numbers are int64 and count the elements as this data set has them, shuffled or not. After
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


def _unbatched(name: str, dataset: Any) -> Pipeline:
    """Return the pipeline of `dataset`, which must not be batched."""
    if not isinstance(dataset, Transformations):
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


def _policy_of(datasets: Iterable[Transformations]) -> AutoShardPolicy:
    """Return how the first of `datasets` is to be divided among ranks."""
    return next(iter(datasets))._auto_shard_policy
