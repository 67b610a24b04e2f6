"""Ragged batch: elements of different lengths as concatenated values and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.batching import Batch
from mpistrat.data.spec import ArraySpec
from mpistrat.data.stacking import Column, stacked
from mpistrat.ragged import Ragged

__all__ = ["RaggedBatch"]


@dataclass(frozen=True)
class RaggedBatch(Batch):
    """Batches in which each leaf whose lengths may differ is a `Ragged`."""

    def spec_of(self, element_spec: Any, is_mapped: bool) -> Any:
        """Return the nest of specs of a batch of elements."""

        def ragged(leaf: ArraySpec, batched: ArraySpec) -> ArraySpec:
            if not (leaf._is_ragged or (is_mapped and leaf.shape)):
                return batched
            return ArraySpec((self.known_length, None, *leaf.shape[1:]), leaf.dtype, True)

        leaves, structure = nests.flatten(element_spec)
        plain, _ = nests.flatten(super().spec_of(element_spec, is_mapped))
        return nests.unflatten(structure, map(ragged, leaves, plain))

    def stack(self, column: Column, structure: nests.Structure, number: int) -> Any:
        """Return a column as one value."""
        if not column.is_ragged:
            return stacked(column, self.batch_size)
        lengths = [shape[0] for shape in column.shapes]
        splits = np.cumsum([0, *lengths], dtype=np.int64)
        rows = list(column.values)
        for number, row in enumerate(rows):
            if row.shape[1:] != rows[0].shape[1:]:
                column.refuse(number, column.name(0), rows[0].shape)
        if not rows:
            trailing = column.spec._known_shape[1:]
            return Ragged(np.empty((0, *trailing), column.spec.dtype), splits)
        return Ragged(np.concatenate(rows), splits)
