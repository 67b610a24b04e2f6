"""Where arrays lie in memory."""

import types

import numpy as np
import pytest

from mpistrat import arrays
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


class OnDevice:
    """As much of a device array as `synchronize` sees, with a log of what is done."""

    def __init__(self, log):
        self.log = log
        self.device = self

    def __enter__(self):
        self.log.append("its device is the current one")

    def __exit__(self, *_):
        self.log.append("as before")


def test_device_memory_is_waited_for_on_its_device(monkeypatch):
    log = []
    stream = types.SimpleNamespace(synchronize=lambda: log.append("synchronized"))
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setattr("mpistrat.cuda_api.cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(
        arrays.array_api_compat, "is_cupy_array", lambda array: isinstance(array, OnDevice)
    )
    arrays.synchronize(np.ones(2))
    assert log == []
    arrays.synchronize(OnDevice(log))
    assert log == ["its device is the current one", "synchronized", "as before"]
