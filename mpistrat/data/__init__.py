"""Data sets: read in a fixed global order, divided among the ranks."""

from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.data.policy import AutoShardPolicy
from mpistrat.data.random_numbers import example_rng, example_rngs
from mpistrat.data.spec import ArraySpec

__all__ = [
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "example_rng",
    "example_rngs",
]
