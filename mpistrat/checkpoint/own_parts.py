"""Own parts of variables in a file: which bytes of it each rank holds, and their reads."""

from __future__ import annotations

from mpistrat.arrays import is_on_host
from mpistrat.checkpoint.raw_io import read_at
from mpistrat.checkpoint.shards import Extent, read_box
from mpistrat.checkpoint.tensors import Box
from mpistrat.options import VariableSynchronization
from mpistrat.variables import CentralVariable, ShardedVariable, SplitVariable, Variable

__all__ = ["has_bytes_of_file", "has_part_of_file", "read_own"]


def has_bytes_of_file(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold the bytes of the file."""
    is_whole = variable.synchronization is not VariableSynchronization.ON_READ
    if variable._is_remote or _is_divided(variable):
        return False
    return is_whole and is_on_host(variable._storage)


def has_part_of_file(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold a part of what is in the file."""
    return _is_divided(variable) and is_on_host(variable._storage)


def _is_divided(variable: Variable) -> bool:
    """Return whether each rank fills a part of it."""
    is_divided = isinstance(variable, ShardedVariable | CentralVariable | SplitVariable)
    return is_divided and not variable._is_remote


def _bytes_before(variable: Variable) -> int:
    """Return how many bytes of the whole lie before those that this rank holds."""
    if not isinstance(variable, ShardedVariable | CentralVariable):
        return 0
    return variable._own_elements.start * variable.dtype.itemsize


def read_own(handle: int, extent: Extent, variable: Variable) -> None:
    """Read what this rank holds of a variable that lies in `extent` of a file."""
    if isinstance(variable, SplitVariable):
        box = Box(variable._split.own_offset, variable.shape)
        read_box(handle, extent, variable.full_shape, box, variable._own_storage)
    else:
        read_at(handle, extent.offset + _bytes_before(variable), variable._own_storage)
