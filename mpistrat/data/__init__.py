"""Datasets: the ranks read them in one global order, and each reads its part."""

from typing import TYPE_CHECKING, NoReturn

from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.data.hdf5.fields import Field
from mpistrat.data.hdf5_writer.writer import HDF5Writer
from mpistrat.data.random import example_rng, example_rngs
from mpistrat.data.spec import ArraySpec
from mpistrat.data.transformations.map import AUTOTUNE
from mpistrat.options import AutoShardPolicy
from mpistrat.ragged import Ragged

__all__ = [
    "AUTOTUNE",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "Field",
    "HDF5Writer",
    "Ragged",
    "example_rng",
    "example_rngs",
]

if not TYPE_CHECKING:  # for type checkers, a name that is missing is an error

    def __getattr__(name: str) -> NoReturn:
        from mpistrat.system.migration import missing_name

        raise missing_name(__name__, name)
