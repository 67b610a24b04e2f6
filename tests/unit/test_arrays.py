"""Where arrays lie in memory."""

import numpy as np
import pytest

from mpistrat.arrays import address_of


@pytest.mark.parametrize("dtype", ["?", "u1", "f2", ">f4", "f8", "g", "G", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
@pytest.mark.parametrize("writeable", [True, False])
def test_addresses_are_those_of_the_array_interface(dtype, shape, writeable):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    array = np.ones(shape, dtype)
    array.flags.writeable = writeable
    for each in (array, array[::-1] if shape else array, array.T):
        assert address_of(each) == each.__array_interface__["data"][0]
