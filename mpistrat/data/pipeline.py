"""Pipeline of a dataset: a source and its transformations, which run during iteration."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import sharding
from mpistrat.arrays import Device
from mpistrat.data.elements import ElementMaker, examples_to_read, look_ahead
from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    Order,
    Reader,
    SameOrder,
    Source,
    Transformation,
    span_of,
)
from mpistrat.data.random import PassStream
from mpistrat.data.spec import open_batch, spec_of, with_room_for_text
from mpistrat.data.transformations.batch import Batch, Enumerate, Unbatch
from mpistrat.data.transformations.map import Map, Numbering, wrapped
from mpistrat.data.transformations.shuffle import Shuffle
from mpistrat.errors import DataError
from mpistrat.system.background import in_background

Prepare = Callable[[Any], Any]
"""Takes a batch in host memory, and may begin to copy it to a device."""


def _unchanged(batch: Any) -> Any:
    return batch


_USUAL = (
    "drop_remainder=False",
    "padded_shapes=None",
    "padding_values=0",
    "reshuffle_each_iteration=True",
    "window=None",
)


def _as_call(transformation: Transformation) -> str:
    """Return the call that adds the transformation, without arguments that have their defaults."""
    if isinstance(transformation, Unbatch):
        return "unbatch()"
    name, _, rest = repr(transformation).partition("(")
    given = [each for each in rest[:-1].split(", ") if each not in _USUAL]
    method = re.sub("(?<!^)(?=[A-Z])", "_", name).lower()
    return f"{method}({', '.join(given)})"


def numbered_steps(transformations: Iterable[Transformation]) -> list[str]:
    """Return a string for each transformation, which the ranks compare."""
    return [f"{each!r} as step {number}" for number, each in enumerate(transformations, 1)]


@dataclass(frozen=True)
class Prefetch(SameOrder):
    """Up to `num_elements` elements that a thread prepares ahead."""

    num_elements: int


@dataclass(frozen=True)
class Pipeline:
    """A source and the transformations applied to it, in order."""

    source: Source
    transformations: tuple[Transformation, ...] = ()
    branch: int = 0
    """The rank, if each rank has different examples, else 0; for random numbers of maps."""
    finds_sound: bool = False
    """Whether examples that raise an error are skipped when the spec is found."""
    _specs: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The specs that `_spec` has found, by level."""

    def __str__(self) -> str:
        if not self.source.is_read:  # files are not opened for this
            return self.calls
        length = {ENDLESS: "endless", UNKNOWN: "unknown length"}.get(self.length, str(self.length))
        unit = "" if self.length < 0 else " examples" if self.batch is None else " batches"
        return f"{self.calls}, {length}{unit}"

    @property
    def calls(self) -> str:
        """The calls that create the dataset, as the user writes them."""
        # The name of a cache already has the inherited steps of the order.
        later = self.transformations[getattr(self.source, "num_inherited", 0) :]
        return ".".join([repr(self.source), *map(_as_call, later)])

    @property
    def kind(self) -> str:
        """The methods that determine the elements, with the functions passed to them."""
        same = [each for each in self.transformations if isinstance(each, SameOrder)]
        others = [_as_call(each) for each in same if not isinstance(each, Prefetch)]
        return ".".join([self.source.kind, *others])

    @property
    def order(self) -> Order:
        """The order of the elements."""
        return Order(self.source, self.transformations)

    @property
    def source_entries(self) -> list[str]:
        """Strings that ranks compare: the number of examples and the rest of the source's order."""
        number = self.source.num_examples
        count = {ENDLESS: "endless", UNKNOWN: "unknown"}.get(number, str(number))
        return [f"{count} examples", *self.source.order_entries]

    @property
    def order_entries(self) -> list[str]:
        """Strings that ranks compare: everything that decides the order of the elements."""
        steps = [each for each in self.transformations if not isinstance(each, SameOrder)]
        return [*self.source_entries, *numbered_steps(steps)]

    def only(self, fields: tuple[Any, ...]) -> Pipeline | None:
        """Return the dataset of tuples of some fields; ``None`` if that would read no less."""
        has_maps = any(isinstance(each, Map) for each in self.transformations)
        source = None if has_maps else self.source.only(fields)
        return None if source is None else Pipeline(source, self.transformations, self.branch)

    def tolerant(self) -> Pipeline:
        """Return the pipeline with the spec of the first example that raises no error."""
        tolerant = getattr(self.source, "tolerant", None)
        source = self.source if tolerant is None else tolerant()
        return dataclasses.replace(self, source=source, finds_sound=True)

    def then(self, transformation: Transformation) -> Pipeline:
        """Return the pipeline with one more transformation."""
        return dataclasses.replace(self, transformations=(*self.transformations, transformation))

    def with_batch_size(self, batch_size: int) -> Pipeline:
        """Return the pipeline with global batches of this size; inner batches keep their size."""
        transformations = tuple(
            # Compared by identity, because an inner batch may be equal to this one.
            dataclasses.replace(each, batch_size=batch_size) if each is self.batch else each
            for each in self.transformations
        )
        return dataclasses.replace(self, transformations=transformations)

    @property
    def batch(self) -> Batch | None:
        """The transformation that creates global batches: the last one that groups items."""
        return self._batches[-1] if self._batches else None

    @property
    def _batches(self) -> list[Batch]:
        """The transformations that group items: the first groups examples, later ones batches."""
        return self._batches_and_levels[0]

    @property
    def _levels(self) -> list[tuple[Transformation, ...]]:
        """The transformations of examples, then of the batches that each `Batch` creates."""
        return [tuple(each for _, each in level) for level in self._batches_and_levels[1]]

    @cached_property
    def _batches_and_levels(self) -> tuple[list[Batch], list[list[tuple[int, Transformation]]]]:
        """The transformations that group items, and the numbered transformations of each level."""
        batches: list[Batch] = []
        levels: list[list[tuple[int, Transformation]]] = [[]]
        for number, each in enumerate(self.transformations):
            if isinstance(each, Batch):
                batches.append(each)
                levels.append([])
            elif isinstance(each, Unbatch):  # maps of its batches get batches of one example now
                batches.pop()
                of_batches = levels.pop()
                levels[-1] += [(n, wrapped(other)) for n, other in of_batches]
            else:
                levels[-1].append((number, each))
        return batches, levels

    @property
    def length(self) -> int:
        """Number of elements per pass, or `ENDLESS` or `UNKNOWN`."""
        return self.order.length

    @property
    def known_length(self) -> int:
        """Like `length`, but raises ValueError if it is unknown, except for streams."""
        length = self.length
        if length == UNKNOWN and not self.source.is_stream:
            raise ValueError(
                f"{self.calls} has a different number of elements in each epoch: unbatch follows a "
                "shuffle of batches, one of which is shorter, and a step that leaves some of them "
                "out. Call batch with drop_remainder=True, or leave out elements before it."
            )
        return length

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element."""
        spec = self.found_spec
        if spec is None:
            raise DataError(
                "The element_spec of a dataset with map is found by mapping one example, but the "
                "dataset is empty."
            )
        return spec

    @property
    def found_spec(self) -> Any:
        """Like `element_spec`, but ``None`` if there is no example."""
        return self._spec(len(self._batches))

    def _spec(self, level: int) -> Any:
        """Return the spec of elements batched `level` times; ``None`` if there are no examples."""
        # It is kept, because batches ask for it once per element.
        if level not in self._specs:
            self._specs[level] = self._found_spec(level)
        return self._specs[level]

    def _found_spec(self, level: int) -> Any:
        """Return the spec of elements that were batched `level` times; maps are tried on one."""
        has_maps = any(isinstance(each, Map | Enumerate) for each in self._levels[level])
        if not has_maps and level == 0:
            return self.source.element_spec
        below = self._spec(level - 1) if level else None
        if not has_maps:
            batch = self._batches[level - 1]
            return None if below is None else batch.spec_of(below, self._are_mapped[level - 1])
        stream = PassStream((0,), self.branch)
        with (
            closing(self.open(0, stream)) as reader,
            closing(self.maker(reader, stream)) as maker,
        ):
            first = self._first_items(level)
            if not len(first):
                return None
            if level:
                return open_batch(spec_of(maker.batch(first, slice(1), level)), level)
            example = self._first_example(maker, first)
            if example is None:
                return None
            return with_room_for_text(spec_of(example[0]), self.source.element_spec)

    def _first_example(self, maker: ElementMaker, first: Block) -> list[Any] | None:
        """Return a list with the first example, or with the first one that raises no error."""
        if not self.finds_sound:
            return list(maker.examples(first))
        for block in self._unshuffled_before(0).blocks((0,), None):
            for place in range(len(block)):
                with contextlib.suppress(Exception):
                    return list(maker.examples(block[place : place + 1]))
        return None

    def _first_items(self, level: int) -> Block:
        """Return a block with the first item of this level, without shuffling, or an empty one."""
        # Maps are tried on the same item for any seed, pass and number of ranks.
        blocks = self._unshuffled_before(max(level - 1, 0)).blocks((0,), None)
        return next((block[:1] for block in blocks if len(block)), np.empty(0, np.int64))

    def _unshuffled_before(self, number: int) -> Order:
        """Return the order before the batch `number`, or of all if there is none, unshuffled."""
        batches = list(map(id, self._batches))
        places = [n for n, each in enumerate(self.transformations) if id(each) in batches]
        before = self.transformations[: places[number]] if places else self.transformations
        return Order(self.source, tuple(e for e in before if not isinstance(e, Shuffle)))

    def elements(
        self,
        pass_number: int,
        start: int = 0,
        size: int = 1,
        rank: int = 0,
        prepare: Prepare = _unchanged,
    ) -> Generator[Any, None, None]:
        """Return the elements of a pass from `start` on, and of each batch the part of `rank`."""
        # The thread that creates an element also calls `prepare`.
        stream = PassStream((pass_number,), self.branch)
        elements = self._elements(stream, start, size, rank, prepare)
        prefetches = [each for each in self.transformations if isinstance(each, Prefetch)]
        num_ahead = max((each.num_elements for each in prefetches), default=0)
        if not num_ahead:
            return elements
        # CUDA has a current device per thread, so the new thread sets the device of this thread.
        return in_background(elements, num_ahead, Device.for_threads())

    def fixed_elements(self, start: int) -> Generator[Any, None, None]:
        """Return the elements from `start` on, the same in every pass, so nothing may be random."""
        return self.stream_elements(PassStream((0,), self.branch, is_fixed=True), start)

    def stream_elements(self, stream: PassStream, start: int = 0) -> Generator[Any, None, None]:
        """Return the elements of the pass of `stream` from `start` on."""
        return self._elements(stream, start, 1, 0, _unchanged)

    def _elements(
        self, stream: PassStream, start: int, size: int, rank: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return the elements like `elements`, but without prefetching."""
        order, num_batchings = self.order, len(self._batches)

        def part_of(items: Block) -> slice:
            return sharding.slice_of_rank(len(items), size, rank)

        def rows_of(block: Block) -> list[Block]:
            if not num_batchings:
                return [block]
            return [
                examples_to_read(items, part_of(items), num_batchings, needs_first)
                for items in block
            ]

        # Contexts end in reverse order: the threads of maps end before their reader is closed.
        with (
            closing(self.open(self.window_rows, stream)) as reader,
            closing(self.maker(reader, stream)) as make,
        ):
            needs_first = num_batchings == 1 and make.needs_first
            blocks = look_ahead(order.blocks(stream.key, None, start), reader, rows_of)
            if not num_batchings:
                for block in blocks:
                    yield from make.examples(block)
                return
            groups = ((items, part_of(items)) for block in blocks for items in block)
            with closing(make.batches(groups, num_batchings)) as batches:
                for batch in batches:
                    yield prepare(batch)

    @property
    def window_rows(self) -> int:
        """Number of rows that the shuffles mix at a time."""
        shuffles = [each for each in self.transformations if isinstance(each, Shuffle)]
        layout = self.source.layout if shuffles else None
        return max((each.window_rows(layout) for each in shuffles if layout), default=0)

    @property
    def num_maps(self) -> int:
        """Number of maps in the pipeline and its source."""
        maps = [each for each in self.transformations if isinstance(each, Map)]
        return self.source.num_maps + len(maps)

    @property
    def is_steady(self) -> bool:
        """Whether the element at a position is the same in each pass, except for random maps."""
        return (
            self.source.is_steady
            and self.source.is_in_order
            and not any(
                isinstance(each, Shuffle) and each.reshuffle_each_iteration
                for each in self.transformations
            )
        )

    def open(self, window_rows: int, stream: PassStream) -> Reader:
        """Return a reader of the items, including the items of repetitions."""
        repeats = [e.num_repetitions for e in self.transformations if e.num_repetitions != 1]
        reader = self.source.open(window_rows, dataclasses.replace(stream, repeats=tuple(repeats)))
        is_plain = self.source.is_steady and not self.source.num_maps and not self.source.is_stream
        # The repetitions of a number can share a reader only if they mean the same example.
        # Otherwise the source itself must see the number of the repetition.
        return _Repeated(reader, span_of(self.source)) if repeats and is_plain else reader

    def maker(self, reader: Reader, stream: PassStream) -> ElementMaker:
        """Return an object that creates elements from the items of the order."""
        maps = [
            [
                (each, Numbering(self.source, self.transformations, number))
                for number, each in level
                if isinstance(each, Map | Enumerate)
            ]
            for level in self._batches_and_levels[1]
        ]
        stream = dataclasses.replace(stream, first_map=stream.first_map + self.source.num_maps)
        return ElementMaker(reader, maps, self._batches, self._are_mapped, self._spec, stream)

    @cached_property
    def _are_mapped(self) -> list[bool]:
        """Whether the elements of each batch come from a map, so that shapes may differ."""
        are_mapped = [any(isinstance(e, Map | Enumerate) for e in level) for level in self._levels]
        are_mapped[0] = are_mapped[0] or self.source.num_maps > 0
        return are_mapped[:-1]


class _Repeated:
    """A reader of rows that are repeated, each time with greater numbers."""

    def __init__(self, reader: Reader, span: int) -> None:
        self._reader, self._span = reader, span
        self.lookahead_rows = reader.lookahead_rows
        self.close = reader.close
        if hasattr(reader, "check"):  # the reader reads small batches together
            self.check = lambda block: reader.check(block % span)

    def expect(self, block: Block) -> None:
        """Announce rows that will be read."""
        self._reader.expect(block % self._span)

    def read(self, block: Block) -> Any:
        """Return rows."""
        return self._reader.read(block % self._span)
