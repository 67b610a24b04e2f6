"""Types of HDF5 for NumPy's dtypes."""

import h5py
import numpy as np

from mpistrat import hdf5


def test_equal_dtypes_whose_fields_are_marked_differently():
    """h5py marks texts and references in metadata, which dtypes do not compare."""
    fields = [h5py.string_dtype(), h5py.ref_dtype, h5py.string_dtype("ascii")]
    dtypes = [np.dtype([("field", each)]) for each in fields]
    assert dtypes[0] == dtypes[1] == dtypes[2]
    for _ in range(2):
        for dtype in dtypes:
            expected = h5py.h5t.py_create(dtype, logical=True)
            assert hdf5.stored_type(dtype).equal(expected)
    assert hdf5.stored_type(np.dtype("f4")) is hdf5.stored_type(np.dtype("f4"))
