"""Views: sources whose examples are combined from elements of other datasets, in any order.

A view is a function from the number of an example to positions in the datasets below it. So these
datasets keep their own readers, and a shuffle of the view moves only numbers. If the length of a
dataset below is unknown, as for a generator, a `Stream` replaces the view: each rank creates all
examples one after the other, and keeps the examples of its slices.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    KnownPasses,
    PlainSource,
    Reader,
    SameOrder,
    Source,
    blocks_of_range,
    skip_items,
    span_of,
)
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.sources.memory import GeneratorSource
from mpistrat.data.transformations.batch import Batch, columns_of
from mpistrat.data.transformations.repeat import Repeat
from mpistrat.data.transformations.shuffle import Shuffle
from mpistrat.system.background import clean_up

_ENDLESS_BLOCK = 2**12


@dataclass(frozen=True)
class Part:
    """Elements of one dataset, for some of the examples of a block."""

    child: int
    items: Block
    """The items in the order of that dataset."""
    places: np.ndarray | None = None
    """The places of the elements in the block; ``None`` if they fill all of it."""
    run_length: int = 1
    """Each item stands for this many consecutive items, of which it is the first."""


class View:
    """Base class of sources that combine or select elements of the datasets `children`."""

    is_stream = False
    is_in_order = True
    is_fixed = False
    """Whether the examples are found once for all passes, so that nothing may be random."""
    needs_one_spec = False
    """Whether the elements of all datasets must have one spec."""
    is_steady: bool
    name: str
    """The method of `Dataset` that creates it."""
    rows_per_example = 1
    """Number of rows of a child that only one example of a batch needs."""

    def __init__(self, children: Sequence[Pipeline]) -> None:
        self.children = tuple(children)
        self.is_steady = all(child.is_steady for child in children)
        self.num_maps = sum(child.num_maps for child in children)
        self._layouts: dict[PassKey, ChunkLayout | None] = {}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(child.calls for child in self.children)})"

    def _settle_order(self, child: Pipeline) -> None:
        """Set `is_steady` and `is_in_order`: shuffles change the order of elements, not numbers."""
        is_shuffled = any(isinstance(each, Shuffle) for each in child.transformations)
        is_repeated = any(each.num_repetitions != 1 for each in child.transformations)
        if permutes_rows(child):
            self.is_steady = child.source.is_steady
        else:  # for example, elements of batches that `unbatch` has taken apart
            self.is_steady = child.is_steady and not (is_shuffled or is_repeated)
        self.is_in_order = child.source.is_in_order and not is_shuffled

    @property
    def kind(self) -> str:
        """The name of the method, with the kinds of the datasets."""
        return f"{self.name}({', '.join(child.kind for child in self.children)})"

    @property
    def is_read(self) -> bool:
        """Whether all datasets know their length and spec."""
        return all(child.source.is_read for child in self.children)

    @property
    def is_of_files(self) -> bool:
        """Whether examples are stored in files."""
        return any(child.source.is_of_files for child in self.children)

    @property
    def order_entries(self) -> list[str]:
        """Everything that decides the order: the view itself, then each dataset."""
        return [self.described, *self.child_entries]

    @property
    def child_entries(self) -> list[str]:
        """Everything that decides the order of each dataset."""
        return [
            f"{entry} in data set {number} of {self.name}"
            for number, child in enumerate(self.children)
            for entry in child.order_entries
        ]

    @property
    def described(self) -> str:
        """A description of this view as a string, which the ranks compare."""
        return f"{self.name} of {len(self.children)} data set(s)"

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example; ``None`` if there is no example to find it."""
        return self.children[0].found_spec

    @cached_property
    def num_examples(self) -> int:
        """Number of examples, or `ENDLESS`."""
        raise NotImplementedError

    @property
    def file_starts(self) -> np.ndarray:
        """The numbers of the first examples of all files but the first."""
        return position_borders(self.children[0])

    def only(self, fields: tuple[Any, ...]) -> View | None:
        """Return the view of tuples of some fields; ``None`` if that would read no less."""
        children = [child.only(fields) for child in self.children]
        return self._over([child for child in children if child is not None])

    def _over(self, children: Sequence[Pipeline]) -> View | None:
        """Return the same view of `children`; ``None`` if some are missing."""
        if len(children) < len(self.children):
            return None
        view = copy.copy(self)
        # A cached spec belongs to the datasets with all fields.
        vars(view).pop("element_spec", None)
        view.children, view._layouts = tuple(children), {}
        return view

    @property
    def layout(self) -> ChunkLayout | None:
        """The chunks of the first pass, to estimate sizes."""
        return self.layout_of((0,))

    def layout_of(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks in the pass `key`."""
        if self.is_steady:
            key = (0,)
        if key not in self._layouts:
            # At most two layouts are kept: of the first pass and of the latest one.
            for old in list(self._layouts)[1:]:
                del self._layouts[old]
            is_endless = self.num_examples == ENDLESS
            self._layouts[key] = None if is_endless else self.find_layout(key)
        return self._layouts[key]

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks that examples, by number, are read from in the pass `key`."""
        raise NotImplementedError

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return how many rows of `child` the examples of a window need."""
        mine = self.layout if window_rows else None
        theirs = child.source.layout if mine is not None else None
        if mine is None or theirs is None:
            return window_rows
        return -(-window_rows * mine.bytes_per_row // max(theirs.bytes_per_row, 1))

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the pass `key` from `start` on."""
        if self.num_examples == ENDLESS:
            return count_from(start)
        return blocks_of_range(range(self.num_examples)[start:])

    def open(self, window_rows: int, stream: PassStream) -> Reader:
        """Return a reader with a reader of each dataset."""
        if self.needs_one_spec:
            _ = self.element_spec  # or raises
        return ViewReader(self, window_rows, stream)

    def open_child(self, pipeline: Pipeline, window_rows: int, stream: PassStream) -> Child:
        """Return a reader of the elements that `parts` names in one of the datasets."""
        return Child(pipeline, window_rows, stream)

    def row_lengths(self) -> np.ndarray | None:
        """Return ``None``: the length of the arrays is not known before an example is created."""
        return None

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements that the examples `numbers` need in the pass `key`."""
        raise NotImplementedError

    def joined(self, num_examples: int, parts: Sequence[Part], columns: Sequence[Any]) -> Any:
        """Return the nest of columns of a block, joined from the columns of its parts."""
        places = [part.places for part in parts]
        return columns[0] if places[0] is None else scattered(num_examples, places, columns)

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the examples, created from the elements of the datasets, one after the other."""
        raise NotImplementedError


def count_from(start: int) -> Iterator[Block]:
    """Return the numbers from `start` on, endlessly."""
    while True:
        yield np.arange(start, start + _ENDLESS_BLOCK)
        start += _ENDLESS_BLOCK


class Child:
    """Reads elements of an unbatched dataset by their positions, in any pass."""

    def __init__(self, pipeline: Pipeline, window_rows: int, stream: PassStream) -> None:
        self._order = pipeline.order
        self._reader: Any = pipeline.open(max(window_rows, pipeline.window_rows), stream)
        self._maker = pipeline.maker(self._reader, stream)
        self._known: KnownPasses = {}
        self.lookahead_rows = self._reader.lookahead_rows
        has_maps = pipeline.num_maps > 0
        self._reads_runs = not has_maps and getattr(self._reader, "reads_runs", False)

    def at(self, positions: np.ndarray, key: PassKey) -> Block:
        """Return the items at `positions` of the pass `key`."""
        return self._order.at(positions, key, self._known)

    def expect(self, part: Part, key: PassKey) -> None:
        """Announce that the items of `part` will be read in the pass `key`."""
        if not self.lookahead_rows:
            return
        self._enter(key)
        if part.run_length > 1 and self._reads_runs:
            self._reader.expect_runs(part.items, part.run_length)
        else:
            self._reader.expect(_expanded(part))

    def read(self, part: Part, key: PassKey) -> Any:
        """Return the nest of columns of the items of `part`, mapped, in the pass `key`."""
        self._enter(key)
        if part.run_length > 1 and self._reads_runs and len(part.items):
            return self._reader.read_runs(part.items, part.run_length)
        self._maker.enter(key)
        return self._maker.columns(_expanded(part))

    def _enter(self, key: PassKey) -> None:
        if isinstance(self._reader, ViewReader):
            self._reader.key = key

    def close(self) -> None:
        """Release files and memory, and end the threads of maps."""
        self._maker.close()
        self._reader.close()


def _expanded(part: Part) -> Block:
    """Return all items of `part`."""
    if part.run_length == 1:
        return part.items
    items: Block = (part.items[:, None] + np.arange(part.run_length)).ravel()
    return items


class ViewReader:
    """Reads the examples of a view from readers of the datasets below it."""

    def __init__(self, view: View, window_rows: int, stream: PassStream) -> None:
        self.key = stream.key
        self._view, self._stream = view, stream
        self._span = span_of(view)
        self._children: list[Child] = []
        first_map = stream.first_map
        try:
            for pipeline in view.children:
                own = dataclasses.replace(stream, first_map=first_map, repeats=())
                window = view.child_window(window_rows, pipeline)
                self._children.append(view.open_child(pipeline, window, own))
                first_map += pipeline.num_maps
        # The open children have threads and files, and the caller has no reader to close.
        except BaseException:
            self.close()
            raise
        wanted = [child.lookahead_rows for child in self._children if child.lookahead_rows]
        self.lookahead_rows = max(min(wanted, default=0) // view.rows_per_example, bool(wanted))

    def expect(self, block: Block) -> None:
        """Announce that the examples `block` will be read, after those announced before."""
        for key, numbers, _ in self._passes(block):
            for part in self._view.parts(numbers, key, self._children):
                self._children[part.child].expect(part, key)

    def read(self, block: Block) -> Any:
        """Return the examples `block`, as a nest of columns."""
        if not len(block):  # a dataset below without elements would have no columns
            return columns_of((), self._view.element_spec, 0)
        passes = list(self._passes(block))
        nests_of_passes = []
        for key, numbers, _ in passes:
            parts = self._view.parts(numbers, key, self._children)
            columns = [self._children[part.child].read(part, key) for part in parts]
            nests_of_passes.append(self._view.joined(len(numbers), parts, columns))
        if len(passes) == 1:
            return nests_of_passes[0]
        return scattered(len(block), [places for _, _, places in passes], nests_of_passes)

    def _passes(self, block: Block) -> Iterator[tuple[PassKey, np.ndarray, np.ndarray]]:
        """Yield the numbers of each repetition in `block`, with its key and their places."""
        if not self._stream.repeats or not len(block):
            yield self.key, block, np.arange(0)
            return
        rounds, numbers = np.divmod(block, self._span)
        for each in np.unique(rounds).tolist():
            places = np.flatnonzero(rounds == each)
            yield (*self.key, *self._stream.repetitions(each)), numbers[places], places

    def close(self) -> None:
        """Close the readers of all datasets."""
        clean_up(self._close)

    def _close(self) -> None:
        for child in self._children:
            child.close()


def scattered(
    num_examples: int, places: Sequence[np.ndarray | None], columns: Sequence[Any]
) -> Any:
    """Return one nest of columns, with each of `columns` at its places."""
    flat = [nests.flatten(nest) for nest in columns]
    by_leaf = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [_scattered(num_examples, places, each) for each in by_leaf]
    return nests.unflatten(flat[0][1], leaves)


def _scattered(
    num_examples: int, places: Sequence[np.ndarray | None], columns: Sequence[np.ndarray]
) -> np.ndarray:
    shapes = {column.shape[1:] for column in columns}
    is_ragged = len(shapes) > 1 or any(column.dtype == object for column in columns)
    if not is_ragged:
        dtype = np.result_type(*(column.dtype for column in columns))
        output = np.empty((num_examples, *shapes.pop()), dtype)
        for where, column in zip(places, columns, strict=True):
            output[where] = column
        return output
    output = np.empty(num_examples, object)
    for where, column in zip(places, columns, strict=True):
        for place, row in zip(np.asarray(where).tolist(), column, strict=True):
            output[place] = row
    return output


def position_layout(pipeline: Pipeline, key: PassKey) -> ChunkLayout | None:
    """Return the chunks by position in `pipeline`; ``None`` if they do not matter."""
    rows = pipeline.order.rows
    layout = pipeline.source.layout_of(key) if rows is not None else None
    return None if layout is None or rows is None else layout.of_range(rows)


def position_borders(pipeline: Pipeline) -> np.ndarray:
    """Return the positions in `pipeline` of the first elements of all files but the first."""
    starts, order = pipeline.source.file_starts, pipeline.order
    if not len(starts):
        return starts
    rows = order.rows
    if rows is not None:
        borders = np.unique(-((rows.start - starts) // rows.step))
        return borders[(borders > 0) & (borders < len(rows))]
    if order.length == ENDLESS or not pipeline.is_steady:
        raise no_fixed_files(pipeline.calls)
    items = order.at(np.arange(order.length), (0,), {})
    return borders_between(np.searchsorted(starts, items % span_of(pipeline.source), "right"))


def no_fixed_files(calls: str) -> ValueError:
    """Return the error to raise if each pass has different elements in a file."""
    return ValueError(
        f"{calls} has no fixed order of files, so windows within one file are not defined. Call "
        "window before shuffle, repeat and sample, or with across_files=True."
    )


def borders_between(files: np.ndarray) -> np.ndarray:
    """Return the positions at which the number of the file changes."""
    return np.flatnonzero(np.diff(files)) + 1


def permutes_rows(pipeline: Pipeline) -> bool:
    """Return whether shuffles change only the order of rows, not which rows are left."""
    is_shuffled = not pipeline.source.is_in_order
    for each in pipeline.transformations:
        if isinstance(each, Shuffle):
            is_shuffled = True
        elif isinstance(each, Batch | Repeat) or (is_shuffled and not isinstance(each, SameOrder)):
            return False
    return True


def without_shuffles(pipeline: Pipeline) -> Pipeline:
    """Return the dataset in the order of its numbers."""
    others = [each for each in pipeline.transformations if not isinstance(each, Shuffle)]
    return dataclasses.replace(pipeline, transformations=tuple(others))


def unshuffled_rows(pipeline: Pipeline) -> range | None:
    """Return the rows of elements without the shuffles; ``None`` if a shuffle chooses the rows."""
    length = pipeline.source.num_examples
    if length < 0 or not permutes_rows(pipeline):
        return None
    rows: range | None = range(length)
    for each in pipeline.transformations:
        if rows is not None and not isinstance(each, Shuffle):
            rows = each.rows(rows)
    return rows


def view_or_stream(view: View) -> Source:
    """Return `view`, or the stream of its examples if they cannot be read in any order."""
    return Stream(view) if any(child.source.is_stream for child in view.children) else view


class Stream(PlainSource):
    """The examples of a view, created one after the other."""

    lookahead_rows = 0
    is_stream = True
    layout: ChunkLayout | None = None
    num_examples = UNKNOWN

    def __init__(self, view: View) -> None:
        self._view = view
        self.kind = view.kind
        self.num_maps = view.num_maps

    def __repr__(self) -> str:
        return repr(self._view)

    @property
    def streamed(self) -> tuple[Pipeline, ...]:
        """The datasets whose elements it combines."""
        return self._view.children

    @property
    def order_entries(self) -> list[str]:
        """Everything that decides the order of each dataset."""
        return self._view.child_entries

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example."""
        return self._view.element_spec

    @cached_property
    def _checked(self) -> GeneratorSource:
        """The source that checks and stacks examples."""
        return GeneratorSource(tuple, self.element_spec)

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return one item for each example of the pass `key` from `start` on."""
        return skip_items(self._blocks(key), start)

    def _blocks(self, key: PassKey) -> Iterator[Block]:
        first_map = 0
        with contextlib.ExitStack() as stack:
            elements = []
            for child in self._view.children:
                # Maps are numbered over all datasets, so two maps with the same seed draw
                # different numbers.
                stream = PassStream(key, child.branch, first_map, (), self._view.is_fixed)
                own = stack.enter_context(contextlib.closing(child.stream_elements(stream)))
                elements.append(own)
                first_map += child.num_maps
            for number, element in enumerate(self._view.streamed(elements)):
                item = np.empty(1, object)
                item[0] = self._checked.example(element, number)
                yield item

    def expect(self, block: Block) -> None:
        """Nothing to prepare: the items are the examples."""

    def open(self, window_rows: int, stream: PassStream) -> Stream:
        """Return the source itself: its items are the examples."""
        return self

    def read(self, block: Block) -> Any:
        """Return the examples of `block`, stacked."""
        return self._checked.read(block)

    def close(self) -> None:
        """Nothing to release."""
