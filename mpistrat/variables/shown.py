"""Text and HTML forms of variables."""

from __future__ import annotations

import math
from typing import Any

from mpistrat.arrays import Array
from mpistrat.system.text import html_table, readable_size, small_values

__all__ = ["ShownVariable"]


class ShownVariable:
    """Mixin of `Variable`: how it is shown."""

    name: Any
    shape: Any
    dtype: Any
    synchronization: Any
    aggregation: Any
    trainable: Any
    _storage: Array
    _target: Any

    def _shown_values(self) -> str | None:
        """Return the local component as text, if it is short. Local."""
        return small_values(self._storage)

    def __repr__(self) -> str:
        values = self._shown_values()
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} on {self._target.device}"
            + ("" if values is None else f", local component {values}")
            + ">"
        )

    def _repr_html_(self) -> str:
        values = self._shown_values()
        rows = [
            ("shape", self.shape),
            ("dtype", self.dtype),
            ("size", readable_size(math.prod(self.shape) * self.dtype.itemsize)),
            ("device", self._target.device),
            ("synchronization", self.synchronization.name),
            ("aggregation", self.aggregation.name),
            ("trainable", self.trainable),
        ]
        rows += [] if values is None else [("local component", values)]
        return html_table(f"{type(self).__name__} {self.name!r}", rows)
