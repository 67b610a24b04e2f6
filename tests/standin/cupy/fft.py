"""What array-api-compat asks of ``cupy.fft``."""

import numpy as _np

from ._array import operand as _operand
from ._array import wrap as _wrap


def _define(name):
    def function(*args, **kwargs):
        return _wrap(getattr(_np.fft, name)(*map(_operand, args), **kwargs))

    function.__name__ = name
    return function


__all__ = [
    "fft",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftn",
]  # fmt: skip
for _name in __all__:
    globals()[_name] = _define(_name)


def fftfreq(n, d=1.0):
    return _wrap(_np.fft.fftfreq(n, d))


def rfftfreq(n, d=1.0):
    return _wrap(_np.fft.rfftfreq(n, d))
