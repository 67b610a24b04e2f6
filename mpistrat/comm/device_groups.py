"""Kernels that work on many arrays of a device: one launch per group of arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.cuda_api import launch_kernel

THREADS = 256
"""Number of threads of each block."""
_MAX_ARRAYS = 64
"""Most arrays per launch: the table of their addresses is a parameter, of at most 4 KiB."""
_COPIED_BY_BLOCK = 16 * THREADS
"""Number of elements that one block copies."""


def addresses_on_device(arrays: Sequence[Any]) -> list[int]:
    """Return the start address of each CuPy array."""
    return [array.data.ptr for array in arrays]


class Launch:
    """A launch of a kernel on one group of arrays, of which only some addresses change."""

    # The device copies the table when a kernel is launched, so the host can change it again at
    # once.

    def __init__(self, part: slice, columns: Sequence[Sequence[int]], per_block: int) -> None:
        # The first column has the sizes of the arrays in elements, the second one the addresses
        # that change; the addresses in the other columns stay the same.
        count = len(columns[0])
        self.part = part
        """Which of all arrays belong to this group."""
        self.num_blocks = [-(-size // per_block) for size in columns[0]]
        """Number of blocks of each array."""
        self.grid = sum(self.num_blocks)
        self._count = np.int32(count)
        self._table = np.zeros(1, table_dtype(len(columns)))
        rows = self._table["columns"][0]
        for row, column in zip(rows, columns, strict=True):
            row[:count] = column
        self._changing = rows[1, :count]
        self._table["first_block"][0, 1 : count + 1] = np.cumsum(self.num_blocks)

    def __call__(self, source: tuple[str, str], addresses: Sequence[int], *numbers: Any) -> None:
        """Launch a kernel, for the `addresses` of all arrays, on the current device."""
        if self.grid:
            self._changing[:] = addresses[self.part]
            arguments = (self._table, self._count, *numbers)
            launch_kernel(*source, self.grid, THREADS, arguments)


def launches_for(sizes: Sequence[int], per_block: int, *fixed: Sequence[int]) -> list[Launch]:
    """Return the launches for arrays of `sizes`; `fixed` are columns of constant addresses."""
    parts = [slice(begin, begin + _MAX_ARRAYS) for begin in range(0, len(sizes), _MAX_ARRAYS)]
    return [
        Launch(part, [each[part] for each in (sizes, [0] * len(sizes), *fixed)], per_block)
        for part in parts
    ]


@functools.lru_cache
def table_dtype(num_columns: int) -> np.dtype:
    """Return the dtype of the table of sizes and addresses that the kernels take."""
    fields = [
        ("columns", np.int64, (num_columns, _MAX_ARRAYS)),
        ("first_block", np.uint32, (_MAX_ARRAYS + 1,)),
    ]
    return np.dtype(fields, align=True)


def grouped_source(
    name: str, columns: int, per_block: int, parameters: Sequence[str], found: str, body: str
) -> str:
    """Return a kernel whose blocks each work on a part of one array."""
    # The code also compiles as C: the tests run it without a GPU.
    declared = ", ".join(["const Table table", "const int count", *parameters])
    return f"""
typedef struct {{
    long long columns[{columns}][{_MAX_ARRAYS}];
    unsigned first_block[{_MAX_ARRAYS + 1}];
}} Table;

extern "C" __global__ void {name}({declared}) {{
    int k = 0;
    while (k + 1 < count && blockIdx.x >= table.first_block[k + 1]) ++k;
    const long long size = table.columns[0][k];
    const long long begin = (long long)(blockIdx.x - table.first_block[k]) * {per_block};
    const long long stop = begin + {per_block} < size ? begin + {per_block} : size;
{found}
    for (long long i = begin + threadIdx.x; i < stop; i += {THREADS}) {{
{body}
    }}"""


_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
"""Types of the elements to copy, by the alignment of the dtype."""


class Join:
    """Copies arrays one behind the other into one array of their dtype, on the same device."""

    def __init__(self, sizes: Sequence[int], target: Array) -> None:
        itemsize = target.dtype.itemsize
        # A complex number is aligned like its parts, so the kernel copies the parts.
        word = itemsize // 2 if target.dtype.kind == "c" else itemsize
        self._source = join_source(word)
        (begin,) = addresses_on_device([target])
        starts = np.cumsum([0, *sizes])[:-1] * itemsize + begin
        words = [size * itemsize // word for size in sizes]
        self._launches = launches_for(words, _COPIED_BY_BLOCK, starts.tolist())

    def __call__(self, arrays: Sequence[Array]) -> None:
        """Copy `arrays`, in C order and of the sizes passed before, on the current device."""
        addresses = addresses_on_device(arrays)
        for launch in self._launches:
            launch(self._source, addresses)


@functools.lru_cache
def join_source(itemsize: int) -> tuple[str, str]:
    """Return CUDA code that copies words of `itemsize` bytes, and its function's name."""
    word, name = _WORDS[itemsize], f"mpistrat_join_{itemsize}"
    found = (
        f"    const {word} *from = (const {word} *)table.columns[1][k];\n"
        f"    {word} *to = ({word} *)table.columns[2][k];"
    )
    text = grouped_source(name, 3, _COPIED_BY_BLOCK, (), found, "        to[i] = from[i];")
    return text + "\n}\n", name
