"""Reading through MPI-IO, where h5py can, and a clear word where it cannot."""

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset
from mpistrat.errors import DataError

HAS_MPI = h5py.get_config().mpi


@pytest.mark.parallel_hdf5
@pytest.mark.skipif(not HAS_MPI, reason="this h5py was built without MPI")
@pytest.mark.parametrize("options", [{}, {"chunk": 7, "compression": "gzip"}])
def test_mpi_io_gives_the_same_batches(numbered, options):
    path = numbered(500, **options)
    plain, parallel = (
        list(Dataset.from_hdf5(path, driver=driver).shuffle(0).batch(32).prefetch(2))
        for driver in (None, "mpio")
    )
    assert len(parallel) == len(plain) == 16
    for ours, theirs in zip(parallel, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.skipif(HAS_MPI, reason="this h5py was built with MPI")
def test_without_mpi_in_h5py_the_driver_is_refused(numbered):
    dataset = Dataset.from_hdf5(numbered(5), driver="mpio")
    with pytest.raises(DataError, match=r"built with MPI.*HDF5_MPI=ON"):
        dataset.cardinality()


def test_other_drivers_are_refused():
    with pytest.raises(ValueError, match='None or "mpio", not \'core\''):
        Dataset.from_hdf5("x.h5", driver="core")
