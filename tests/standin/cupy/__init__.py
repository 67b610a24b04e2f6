"""A strict stand-in for CuPy in host memory, for machines without a GPU.

``PYTHONPATH=tests/standin`` puts it in CuPy's place. Arrays are of a class of their own and belong
to one of ``FAKE_CUPY_GPUS`` devices (1 by default). Names, signatures and dtypes are those of the
real CuPy (`names.json`, made by ``tools/cupy_names.py``). What CuPy refuses is refused: implicit
copies to the host, host arrays among the operands, arrays of a device that is not the current one,
positional arguments that CuPy takes by keyword only, dtypes that it does not have. Copies on streams
other than the program's are as late as they may be, and new memory holds garbage.
"""

import types as _types

import numpy as _np

from . import _kernels, cuda
from ._array import ndarray
from ._functions import NAMES as _NAMES
from ._functions import make_functions as _make_functions
from ._kernels import ElementwiseKernel, RawKernel

__version__ = _NAMES["version"]

_made = _make_functions()
globals().update(_made)
for _name in _NAMES["others"]:
    if _name not in globals() and hasattr(_np, _name):
        globals()[_name] = getattr(_np, _name)
cuda.compiler = _types.SimpleNamespace(compile_using_nvrtc=_kernels.compile_using_nvrtc)
cuda.function = _types.SimpleNamespace(Module=_kernels.Module)
ufunc = type(_made["add"])
bool = _np.bool_
float_, complex_ = _np.float64, _np.complex128
newaxis = None

from . import fft, linalg, random  # noqa: E402

__all__ = [_name for _name in globals() if not _name.startswith("_")]
