"""Data sets: read in a fixed global order, divided among the ranks."""

from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.data.random import example_rng, example_rngs
from mpistrat.data.spec import ArraySpec
from mpistrat.options import AutoShardPolicy

__all__ = [
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "example_rng",
    "example_rngs",
]
