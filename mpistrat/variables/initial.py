"""Initial values and default names of variables.

An initial value is evaluated as a whole, or each rank calls it for the rows that the rank holds.
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
    """The names of one strategy that look like default names and are in use."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next = 0
        """Number of the next default name, if that is free."""

    def next_default(self) -> str:
        """Return the next free default name, and mark it as used."""
        while True:
            name = f"Variable_{self._next}" if self._next else "Variable"
            self._next += 1
            if name not in self._taken:
                self.take(name)
                return name

    def take(self, name: str) -> None:
        """Mark `name` as used, so that no variable gets it by default."""
        if _DEFAULT.fullmatch(name) and name not in self._taken:
            self._taken.add(name)
            units.on_undo(functools.partial(self._give_back, name))

    def _give_back(self, name: str) -> None:
        self._taken.discard(name)
        self._next = 0  # the first free name is the same on all ranks, however far each has come


_of_strategies: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()
_of_plain = _Names()
"""Names of plain variables, which belong to no strategy."""


def names_of(strategy: Any) -> _Names:
    """Return the names of the variables of `strategy`; for ``None`` those of plain variables."""
    # All ranks create the variables of a strategy in the same order, so all find the same names.
    return _of_plain if strategy is None else _of_strategies.setdefault(strategy, _Names())


_KEYWORDS = ("partition_shape", "partition_offset")


class InitialValue:
    """The initial value of a variable. It keeps errors for the collective call that creates it.

    A function is called outside that collective, because it may call others. If `shape` is given
    and the function takes the keywords `partition_shape` and `partition_offset`, it is called for a
    part.
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
        """Shape that the program passed, or the shape of the value."""
        self.num_parts = 1
        """Number of parts that the partitioner wants."""
        self.is_always_cut = False
        """Whether the variable is sharded even if it has only one part."""
        self._is_decided = False
        """Whether the number of parts is fixed, so that no partitioner is asked."""
        self.is_zero = False
        """Whether the value is zero, which fresh memory already is."""
        self.is_replicated = False
        """Whether each rank needs the value in its own memory, whatever the strategy."""
        self.is_flat = False
        """Whether the ranks divide the elements, whatever the shape."""
        self.placement: Any = None
        """Class of the placement that the strategy has chosen."""
        try:
            if shape is not None:
                self.shape = tuple(as_integer("shape", each, 0) for each in shape)
            if self.shape is not None and callable(given) and _takes_part(given):
                if dtype is None:
                    raise TypeError(
                        "An initial value that is created in parts needs dtype= and shape=."
                    )
                self._part = given
            else:
                value = given() if callable(given) else given
                self._value = value.value() if hasattr(value, "read_value") else value
        # Kept and not raised: raising on only one rank would leave the others waiting in the call
        # that creates the variable.
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
        """Return zeros, divided into parts like an existing variable."""

        def zeros(partition_shape: Sequence[int], partition_offset: Sequence[int]) -> np.ndarray:
            return np.zeros(partition_shape, dtype)

        made = cls(zeros, shape, dtype, split_axis)
        made.num_parts, made._is_decided, made.is_zero = num_parts, True, True
        return made

    @classmethod
    def replicated(cls, given: Any) -> InitialValue:
        """Return the value of a counter, which all ranks change equally without a message."""
        made = cls(given, None, None)
        made.is_replicated = True
        return made

    def is_cut_by(self, partitioner: Callable[..., Any] | None) -> bool:
        """Return whether `partitioner` wants the variable in several parts."""
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
        """Return the shape of the whole variable."""
        if self._part is not None and self.shape is not None:
            return self.shape
        return tuple(np.shape(_detached(self._value)))

    @property
    def is_split(self) -> bool:
        """Whether each rank of a replica will hold a part."""
        return self._split_axis is not None

    def split_axis(self, name: str) -> int | None:
        """Return the axis along which it is split, ``None`` if it is not."""
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
        """Dtype that the program passed."""
        dtype: np.dtype = np.dtype(self._dtype).newbyteorder("=")
        return dtype

    @property
    def is_made_in_parts(self) -> bool:
        """Whether each rank creates its own rows."""
        return self._part is not None

    def whole(self, name: str) -> np.ndarray:
        """Return the whole value as a host array, or raise the error that prevents it."""
        self.check()
        value = self._value
        if self._part is not None and self.shape is not None:
            value = self._part(partition_shape=self.shape, partition_offset=(0,) * len(self.shape))
        array = numeric(name, value, self._dtype)
        _check_shape(name, array, self.shape)
        return array

    def rows(self, name: str, rows: range) -> np.ndarray:
        """Return one or more rows of a value that is created in parts."""
        assert self.shape is not None
        shape = (len(rows), *self.shape[1:])
        return self.part(name, shape, (rows.start, *[0] * (len(shape) - 1)))

    def part(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> np.ndarray:
        """Return a non-empty part of a value that is created in parts."""
        assert self._part is not None
        part = self._part(partition_shape=shape, partition_offset=offset)
        array = numeric(name, part, self._dtype)
        _check_shape(name, array, shape)
        return array

    def check(self) -> None:
        """Raise the error that was kept, if any."""
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
    """Return the number of parts along axis 0 in the answer of a partitioner."""
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
