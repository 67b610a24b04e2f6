"""What array-api-compat asks of ``cupy.linalg``."""

import numpy as _np

from ._array import operand as _operand
from ._array import wrap as _wrap


def _define(name):
    def function(*args, **kwargs):
        found = getattr(_np.linalg, name)(*map(_operand, args), **kwargs)
        if isinstance(found, tuple):
            return tuple(map(_wrap, found))
        return _wrap(found)

    function.__name__ = name
    return function


__all__ = [
    "cholesky",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "lstsq",
    "matrix_power",
    "matrix_rank",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "tensorinv",
    "tensorsolve",
]  # fmt: skip
for _name in __all__:
    globals()[_name] = _define(_name)
