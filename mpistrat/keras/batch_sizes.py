"""Sizes of global batches, and what they mean for ranks that share each batch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

from mpistrat.data.dataset import Dataset, pipeline_of, policy_of
from mpistrat.errors import DataError
from mpistrat.options import AutoShardPolicy
from mpistrat.sharding import ceil_div, slice_of_rank


class BatchSizes:
    """The sizes of the global batches of a dataset, on `size` ranks."""

    def __init__(self, dataset: Dataset, size: int) -> None:
        self._pipeline, self._size = pipeline_of(dataset), size
        self._pass, self._sizes = -1, list[int]()
        self._has_warned = False
        policy = policy_of(dataset)
        if size > 1 and policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
            raise ValueError(
                f"mpistrat.keras.HDF5Dataset divides each global batch among the ranks, but the "
                f"dataset has auto_shard_policy={policy}. Leave out with_options."
            )

    def of_pass(self, pass_number: int) -> list[int]:
        """Return the number of examples of each global batch, if it is endless of the first."""
        batch = self._pipeline.batch
        assert batch is not None  # it was distributed
        length = self._pipeline.length
        if batch.drop_remainder:
            return [batch.batch_size] * max(length, 1)
        if self._pass != pass_number:
            if length < 0:  # the end of the first repetition of the examples is among these
                length = ceil_div(max(self._pipeline.source.num_examples, 0), batch.batch_size) + 1
            blocks = self._pipeline.order.blocks((pass_number,), None)
            items = itertools.chain.from_iterable(blocks)
            self._sizes = [len(each) for each in itertools.islice(items, length)]
            self._pass = pass_number
        return self._sizes

    def check_for_fit(self, pass_number: int) -> None:
        """Raise, or warn once, if examples would not have the same weight in training."""
        batch = self._pipeline.batch
        assert batch is not None
        full = batch.batch_size
        short = [size for size in self.of_pass(pass_number) if size != full]
        if short:
            raise ValueError(
                f"A batch of this dataset has {short[0]} examples, the others {full}. Keras and "
                "DistributedDataParallel give all batches and all ranks the same weight, so its "
                f"examples would count more. Use batch({full}, drop_remainder=True) for fit."
            )
        if self._rows_of_last(full) == 0:
            raise ValueError(
                f"A global batch of {full} leaves rank {self._size - 1} of {self._size} without "
                f"examples. Use a batch size that is a multiple of {self._size}."
            )
        if full % self._size and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A global batch of {full} does not divide evenly among {self._size} ranks. They "
                "have the same weight in DistributedDataParallel, so the examples of the last rank "
                f"count more. Use a batch size that is a multiple of {self._size}.",
                stacklevel=2,
            )

    def groups(self, pass_number: int) -> list[int]:
        """Return how many consecutive global batches to join so that every rank gets examples."""
        sizes = self.of_pass(pass_number)
        groups: list[int] = []
        pending = 0
        for size in sizes:
            pending += 1
            if self._rows_of_last(size):
                groups.append(pending)
                pending = 0
        if pending and not groups:
            raise DataError(
                f"The batches of this dataset have {max(sizes, default=0)} examples or fewer, "
                f"which leaves rank {self._size - 1} of {self._size} without any. Use larger "
                "batches, or fewer ranks."
            )
        if pending:
            groups[-1] += pending
        return groups

    def _rows_of_last(self, size: int) -> int:
        """Return how many examples the last rank gets, which never gets more than others."""
        part = slice_of_rank(size, self._size, self._size - 1)
        return int(part.stop - part.start)


def starts_of(groups: Sequence[int]) -> list[int]:
    """Return the number of the first batch of each group, and the number of all batches."""
    return [0, *itertools.accumulate(groups)]
