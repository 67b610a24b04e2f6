"""Data set of the public API: its sources, iteration and position."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.element_transformations import ElementTransformations
from mpistrat.data.fingerprint import position_layout
from mpistrat.data.hdf5.fields import Field
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.data.iterators import ElementIterator, Position
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.sources import ArraySource, GeneratorSource, RangeSource
from mpistrat.data.user_source import UserSource, refuse_lazy_arrays
from mpistrat.options import AutoShardPolicy
from mpistrat.system.hints import HintedType
from mpistrat.user_warnings.whole_batches import note_batch

_Name = str | Field


class Dataset(ElementTransformations, metaclass=HintedType):
    """Examples, or batches of them, in a fixed order.

    Each transformation returns a new data set and leaves this one as it is. Nothing is read
    before the first use. Iterating gives nests of NumPy arrays; each iteration is a pass, counted
    from 0. The default strategy distributes nothing and hands out the data set itself, so it has
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
        super().__init__(pipeline, auto_shard_policy)
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
            Paths of the data sets to read, all of one length, or `Field`. An example has the same
            structure: an array, a tuple, or a dict with the given labels. A path with ``*``
            makes an example of each match, and one to compound rows a dict of their members.
            ``None`` takes every top-level data set that can be read, as a dict, and names the
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
            For data sets of h5py, and arrays of zarr, dask and xarray, which would be read whole
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
            If it is no position, or one within a pass that this data set does not have.
        """
        self._position.load(state, position_layout(self._pipeline), self._pipeline.length)
