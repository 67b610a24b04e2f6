"""Collectives in a fixed order: all their reductions go by one tree, whatever the options."""

from __future__ import annotations

import dataclasses
import functools

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.options import CommunicationImplementation, CommunicationOptions


class OrderedCall(CollectiveCall):
    """A collective call whose reductions keep the order."""

    def _check_options(self) -> None:
        super()._check_options()
        check_can_order(self.options)


class OrderedCollectives(Collectives):
    """The collectives of a strategy with ``num_replicas=``; `options` are `in_order`."""

    def call(
        self, kind: str, name: str | None = None, options: CommunicationOptions | None = None
    ) -> CollectiveCall:
        """Return the context manager in which the collective `kind` is checked and done."""
        if options is None:
            options = self.options if name is None else self._lossless_options
        elif isinstance(options, CommunicationOptions):
            options = in_order(options)
        return OrderedCall(self, kind, name, options)


def check_can_order(options: CommunicationOptions) -> None:
    """Refuse what rounds, or adds up elsewhere, in an order that depends on the ranks."""
    if options.wire_dtype is not None:
        raise NotImplementedError(
            f"wire_dtype={options.wire_dtype!r} with num_replicas: what is rounded on the way "
            "would depend on the number of ranks. Leave one of them out."
        )
    if options.implementation is CommunicationImplementation.NCCL:
        raise ValueError(
            "CommunicationImplementation.NCCL with num_replicas: NCCL adds up in an order of its "
            "own. Use AUTO."
        )


@functools.lru_cache
def in_order(options: CommunicationOptions) -> CommunicationOptions:
    """Return `options` with `deterministic`, the same object each time."""
    return dataclasses.replace(options, deterministic=True)
