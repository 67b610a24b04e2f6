"""Global random generators of a rank, as arrays for a checkpoint: PyTorch's, NumPy's and Python's.

They differ between ranks, so a file holds one row per rank. On a different number of ranks no row
fits, and the generators keep the seeds of the program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpistrat.torch.ranks import gather

States = dict[str, np.ndarray]
"""The states of one rank, by name; or those of all ranks, with the ranks as first axis."""


def own_states() -> States:
    """Return the states of this rank's generators. Local."""
    states = {"torch": torch.get_rng_state().numpy().copy()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    if kind == "MT19937":  # a program may choose a different generator
        states["numpy"] = np.append(keys, np.uint32(position))
        states["numpy_normal"] = np.array([has_gauss, gauss], np.float64)
    _, words, normal = random.getstate()
    states["python"] = np.array(words, np.uint32)
    states["python_normal"] = np.array([math.nan if normal is None else normal])
    return states


def set_own_states(states: Mapping[str, np.ndarray]) -> None:
    """Set this rank's generators to states that `own_states` returned. Local."""
    torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(states["cuda"])))
    if "numpy" in states:
        keys, position = states["numpy"][:-1], int(states["numpy"][-1])
        has_gauss, gauss = states["numpy_normal"]
        np.random.set_state(("MT19937", keys, position, int(has_gauss), float(gauss)))
    (normal,) = states["python_normal"].tolist()
    words = tuple(states["python"].tolist())
    random.setstate((3, words, None if math.isnan(normal) else normal))


def states_of_ranks(own: States) -> States:
    """Return the states of all ranks, stacked along the first axis. **Collective**."""
    of_ranks = gather(own)
    found = {}
    for name in own:
        rows = [each.get(name) for each in of_ranks]
        # Ranks may have different devices, whose generators cannot replace each other.
        if all(row is not None and row.shape == rows[0].shape for row in rows):
            found[name] = np.stack(rows)
    return found


def row_of(states: Mapping[str, Any], rank: int, size: int) -> States | None:
    """Return one rank's states; ``None`` if they are of a different number of ranks. Local."""
    if not states or len(states["torch"]) != size:
        return None
    return {name: np.asarray(each)[rank] for name, each in states.items()}
