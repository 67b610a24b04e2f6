"""The ranks that train one model, and what they exchange beside Keras's own reductions."""

from __future__ import annotations

from typing import Any

import keras
import torch
import torch.distributed as dist

from mpistrat.errors import DataError
from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.torch import ranks


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; a single process is rank 0 of 1. Local."""
    return ranks.rank_and_size("mpistrat.keras", "Call mpistrat.keras.init() before the model.")


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. **Collective**."""
    rank_and_size()
    return ranks.gather(value)


def sums_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of tensors over the ranks in float64, in one reduction. **Collective**."""
    _, size = rank_and_size()
    flat = [each.detach().to("cpu", torch.float64).reshape(-1) for each in tensors]
    if size > 1 and flat:
        joined = torch.cat(flat)
        dist.all_reduce(joined)
        flat = list(joined.split([each.numel() for each in flat]))
    return [each.reshape(of.shape) for each, of in zip(flat, tensors, strict=True)]


def check_same_batches(of_ranks: list[int | None]) -> None:
    """Raise DataError if the ranks have different numbers of batches. Local."""
    if len(set(of_ranks)) < 2:
        return
    groups = ranks_by_value(enumerate(of_ranks))
    texts = [
        f"{rank_list(same)} {'has' if len(same) == 1 else 'have'} "
        f"{'an unknown number' if number is None else number}"
        for number, same in groups.items()
    ]
    raise DataError(
        f"The ranks have different numbers of batches: {', '.join(texts)}. Every rank takes part "
        "in each step, so give all ranks equally many batches. mpistrat.keras.HDF5Dataset divides "
        "each global batch among them."
    )


def check_replicated() -> None:
    """Raise if a distribution of the program divides the model itself among ranks. Local."""
    found = keras.distribution.distribution()
    if found is not None and not isinstance(found, keras.distribution.DataParallel):
        raise NotImplementedError(
            f"Replicas and HDF5Checkpoint are for ranks that hold the same model, but the "
            f"distribution of Keras is a {type(found).__name__}. Use DataParallel, which "
            "mpistrat.keras.init() sets."
        )
