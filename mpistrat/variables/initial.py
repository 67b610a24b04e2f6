"""Initial values of variables, and default names: what a variable begins with.

A value is evaluated, or called for its rows on each rank that holds some.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat.arguments import as_integer
from mpistrat.partitioners import RanksPartitioner
from mpistrat.pytorch import is_tensor
from mpistrat.system import units
from mpistrat.variables.writes import numeric

_DEFAULT = re.compile(r"Variable(_\d+)?")


class _Names:
    """The names that look like default ones and are taken, of one strategy."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next = 0
        """The number of the next default name, if that is free."""

    def next_default(self) -> str:
        """Return the next default name that is free, which is taken then."""
        while True:
            name = f"Variable_{self._next}" if self._next else "Variable"
            self._next += 1
            if name not in self._taken:
                self.take(name)
                return name

    def take(self, name: str) -> None:
        """Have no variable get `name` by default."""
        if _DEFAULT.fullmatch(name) and name not in self._taken:
            self._taken.add(name)
            units.on_undo(functools.partial(self._give_back, name))

    def _give_back(self, name: str) -> None:
        self._taken.discard(name)
        self._next = 0  # the first that is free is that of all ranks, however far each has come


_of_strategies: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()
_of_plain = _Names()
"""For plain variables, which belong to no strategy."""


def names_of(strategy: Any) -> _Names:
    """Return the names of the variables of `strategy`, of plain ones for ``None``."""
    # Variables of a strategy are made by all ranks in the same order, so all find the same.
    return _of_plain if strategy is None else _of_strategies.setdefault(strategy, _Names())


_KEYWORDS = ("partition_shape", "partition_offset")


class InitialValue:
    """What a variable begins with. Errors are kept, for the collective that makes the variable.

    A function is called outside of that collective, as it may make others. One that takes the
    keywords `partition_shape` and `partition_offset` is called for a part, where `shape` is given.
    """

    def __init__(
        self,
        given: Any,
        shape: Sequence[int] | None,
        dtype: npt.DTypeLike | None,
        split_axis: Any = None,
    ) -> None:
        self._error: Exception | None = None
        self._part: Callable[..., Any] | None = None
        self._value: Any = None
        self._dtype = dtype
        self._split_axis = split_axis
        self.shape: tuple[int, ...] | None = None
        """What the program says, or the value."""
        self.num_parts = 1
        """What the partitioner wants."""
        self.is_always_cut = False
        """Whether the variable is a sharded one also where it has one part."""
        self._is_decided = False
        """Whether there is nothing to ask a partitioner."""
        self.is_zero = False
        """Whether fresh memory has it already."""
        self.is_replicated = False
        """Whether each rank needs it in memory of its own, whatever the strategy."""
        self.is_flat = False
        """Whether the ranks divide its elements, whatever the shape."""
        self.placement: Any = None
        """The class of the placement that the strategy has chosen."""
        try:
            if shape is not None:
                self.shape = tuple(as_integer("shape", each, 0) for each in shape)
            if self.shape is not None and callable(given) and _takes_part(given):
                if dtype is None:
                    raise TypeError(
                        "An initial value that is made in parts needs dtype= beside shape=."
                    )
                self._part = given
            else:
                value = given() if callable(given) else given
                self._value = value.value() if hasattr(value, "read_value") else value
        # Kept and not raised: on one rank only, it would leave the others waiting in the call that
        # creates the variable.
        except Exception as error:
            self._error = error

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        num_parts: int,
        split_axis: int | None = None,
    ) -> InitialValue:
        """Return zeros, in parts like another variable."""

        def zeros(partition_shape: Sequence[int], partition_offset: Sequence[int]) -> np.ndarray:
            return np.zeros(partition_shape, dtype)

        made = cls(zeros, shape, dtype, split_axis)
        made.num_parts, made._is_decided, made.is_zero = num_parts, True, True
        return made

    @classmethod
    def replicated(cls, given: Any) -> InitialValue:
        """Return the value of a counter, which all ranks change alike without a message."""
        made = cls(given, None, None)
        made.is_replicated = True
        return made

    def is_cut_by(self, partitioner: Callable[..., Any] | None) -> bool:
        """Return whether the variable is to be in parts, as `partitioner` says."""
        if self._error is not None or self._is_decided or partitioner is None or self.is_split:
            return self.num_parts > 1 or self.is_always_cut
        try:
            shape, dtype = self._known_shape(), self._dtype
            if dtype is None:
                dtype = np.asarray(_detached(self._value)).dtype
            if not shape:
                return False
            self.num_parts = _checked(partitioner(shape, np.dtype(dtype)), shape)
            self.is_always_cut = isinstance(partitioner, RanksPartitioner)
        except Exception as error:
            self._error = error
        return self.num_parts > 1 or self.is_always_cut

    def _known_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        if self._part is not None and self.shape is not None:
            return self.shape
        return tuple(np.shape(_detached(self._value)))

    @property
    def is_split(self) -> bool:
        """Whether each rank of a replica is to hold a part."""
        return self._split_axis is not None

    def split_axis(self, name: str) -> int | None:
        """Return the axis that it is split along, ``None`` where it is not."""
        if self._split_axis is None:
            return None
        self.check()
        axis = as_integer("split_axis", self._split_axis)
        shape = self._known_shape()
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"split_axis {axis} is out of range for the variable {name!r} of shape {shape}. "
                + (
                    f"Use an axis in [{-len(shape)}, {len(shape) - 1}]."
                    if shape
                    else "It has none."
                )
            )
        return axis % len(shape)

    @property
    def dtype(self) -> np.dtype:
        """What the program says."""
        dtype: np.dtype = np.dtype(self._dtype).newbyteorder("=")
        return dtype

    @property
    def is_made_in_parts(self) -> bool:
        """Whether each rank makes its own rows."""
        return self._part is not None

    def whole(self, name: str) -> np.ndarray:
        """Return all of it as a host array, or raise why there is none."""
        self.check()
        value = self._value
        if self._part is not None and self.shape is not None:
            value = self._part(partition_shape=self.shape, partition_offset=(0,) * len(self.shape))
        array = numeric(name, value, self._dtype)
        _check_shape(name, array, self.shape)
        return array

    def rows(self, name: str, rows: range) -> np.ndarray:
        """Return these rows of what is made in parts; there is at least one."""
        assert self.shape is not None
        shape = (len(rows), *self.shape[1:])
        return self.part(name, shape, (rows.start, *[0] * (len(shape) - 1)))

    def part(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
        """Return a part, which is not empty, of what is made in parts."""
        assert self._part is not None
        part = self._part(partition_shape=shape, partition_offset=offset)
        array = numeric(name, part, self._dtype)
        _check_shape(name, array, shape)
        return array

    def check(self) -> None:
        """Raise what has gone wrong."""
        if self._error is not None:
            raise self._error


def _detached(value: Any) -> Any:
    # NumPy cannot convert a tensor that requires a gradient.
    return value.detach() if is_tensor(value) else value


def _takes_part(function: Callable[..., Any]) -> bool:
    target = function.func if isinstance(function, functools.partial) else function
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # compiled functions may have none
        return False
    return all(name in parameters for name in _KEYWORDS)


def _check_shape(name: str, array: np.ndarray, expected: tuple[int, ...] | None) -> None:
    if expected is not None and array.shape != expected:
        raise ValueError(
            f"The initial value of the variable {name!r} has the shape {array.shape}, but "
            f"{expected} was asked for."
        )


def _checked(counts: Any, shape: tuple[int, ...]) -> int:
    """Return how many parts along axis 0 the answer of a partitioner means."""
    fits = isinstance(counts, Sequence) and len(counts) == len(shape)
    if not fits or any(as_integer("a count of the partitioner", each) < 1 for each in counts):
        raise ValueError(
            f"The partitioner has returned {counts!r} for the shape {shape}: it must return one "
            "count of at least 1 for each axis."
        )
    if any(each > 1 for each in counts[1:]):
        raise ValueError(
            f"The partitioner has returned {list(counts)} for the shape {shape}, but variables "
            "are cut along axis 0 only."
        )
    return int(counts[0])
