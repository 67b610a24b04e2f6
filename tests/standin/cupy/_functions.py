"""Functions with CuPy's signatures, which NumPy computes."""

import inspect
import json
from pathlib import Path

import numpy as np

from . import cuda
from ._array import check_dtype, ndarray, operand, supports, wrap

NAMES = json.loads((Path(__file__).parent / "names.json").read_text())

_P = inspect.Parameter
_KINDS = {
    "positional": _P.POSITIONAL_ONLY,
    "both": _P.POSITIONAL_OR_KEYWORD,
    "rest": _P.VAR_POSITIONAL,
    "keyword": _P.KEYWORD_ONLY,
    "keywords": _P.VAR_KEYWORD,
}

_ABOUT_DTYPES = {"result_type", "can_cast", "issubdtype", "promote_types", "min_scalar_type",
                 "isdtype", "common_type", "iscomplexobj", "isrealobj", "ndim", "shape", "size",
                 "broadcast_shapes", "set_printoptions", "get_printoptions", "printoptions",
                 "isscalar", "format_float_positional", "base_repr", "binary_repr", "errstate",
                 "array_repr", "array_str", "array2string"}  # fmt: skip
_FROM_HOST = {"asarray", "array", "ascontiguousarray", "asanyarray", "asfortranarray"}
_MAKING = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like",
           "arange", "linspace", "eye", "identity"}  # fmt: skip


def _signature(parameters):
    if parameters is None:
        return None
    # Those after one with a default have one: CuPy's compiled functions say so themselves.
    return inspect.Signature(
        [_P(name, _KINDS[kind], default=None if optional and kind not in ("rest", "keywords")
            else _P.empty) for name, kind, optional in parameters]
    )  # fmt: skip


def _unwrapped(value):
    if isinstance(value, (tuple, list)):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, (str, np.dtype, type, slice, type(Ellipsis))) or callable(value):
        return value
    return operand(value)


def _wrapped(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return wrap(value)
    if isinstance(value, tuple):
        made = [_wrapped(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return [_wrapped(each) for each in value] if isinstance(value, list) else value


def _dtypes_of(values):
    for value in values:
        if isinstance(value, np.ndarray):
            yield value.dtype
        elif isinstance(value, (tuple, list)):
            yield from _dtypes_of(value)


class ufunc:  # noqa: N801
    """One of CuPy's element-wise functions."""

    def __init__(self, name, nin, nout, types):
        self.__name__ = self.name = name
        self.nin, self.nout, self.types = nin, nout, types
        self._function = getattr(np, name)

    def __call__(self, *args, out=None, dtype=None, **kwargs):
        if kwargs or len(args) not in (self.nin, self.nin + self.nout):
            raise TypeError(f"Wrong arguments of {self.name}: {len(args)} and {sorted(kwargs)}")
        if len(args) > self.nin:
            out = args[self.nin]
        host = [operand(each) for each in args[: self.nin]]
        self._check(host)
        given = {} if dtype is None else {"dtype": dtype}
        with np.errstate(all="ignore"):
            if out is None:
                return _wrapped(self._function(*host, **given))
            if not isinstance(out, ndarray):
                raise TypeError("Output arguments type must be cupy.ndarray")
            self._function(*host, out=operand(out), casting="same_kind", **given)
        return out

    def _check(self, host):
        # A dtype of which no loop takes it, not even as a wider one. E is bfloat16, with ml_dtypes.
        takes = {loop.partition("->")[0][0] for loop in self.types} - {"E"}
        for dtype in _dtypes_of(host):
            if dtype.name == "bfloat16" or not any(np.can_cast(dtype, char) for char in takes):
                raise TypeError(f"Wrong type ({dtype}) of arguments for cupy_{self.name}")


def _function(name, parameters):
    signature = _signature(parameters)
    in_numpy = getattr(np, name)

    def function(*args, **kwargs):
        if signature is not None:
            signature.bind(*args, **kwargs)
        host = [_unwrapped(each) for each in args]
        given = {key: _unwrapped(each) for key, each in kwargs.items()}
        out = kwargs.get("out")
        if name in _ABOUT_DTYPES:
            return in_numpy(*host, **given)
        for dtype in _dtypes_of((*host, *given.values())):
            if dtype.name == "bfloat16" and name not in _MAKING | {
                "concatenate", "stack", "reshape", "ravel", "copyto", "array_equal", "atleast_1d",
                "broadcast_to", "transpose", "squeeze", "expand_dims", "copy", "moveaxis", "split",
            }:  # fmt: skip
                raise TypeError(f"Wrong type (bfloat16) of arguments for cupy_{name}")
        with np.errstate(all="ignore"):
            found = in_numpy(*host, **given)
        return out if out is not None else _wrapped(found)

    function.__name__ = function.__qualname__ = name
    if signature is not None:
        function.__signature__ = signature
    return function


def _where(condition, x=None, y=None):
    if x is None and y is None:
        return condition.nonzero()
    if not isinstance(condition, ndarray):  # its astype is called
        raise AttributeError(f"{type(condition).__name__!r} object has no attribute 'astype'")
    return wrap(np.where(operand(condition), operand(x), operand(y)))


def _matmul(*args, **kwargs):
    for each in args:
        if not isinstance(each, ndarray):
            raise TypeError(f"Argument 'b' has incorrect type (got {type(each).__name__})")
    left, right = (operand(each) for each in args)
    return wrap(np.matmul(left, right))


def _method(name):
    def function(a, *args, **kwargs):
        if not isinstance(a, ndarray):
            raise AttributeError(f"{type(a).__name__!r} object has no attribute {name!r}")
        return getattr(a, name)(*args, **kwargs)

    function.__name__ = name
    return function


def _reduced(name, array, axis=None, keepdims=False, **kwargs):
    if array.dtype.name == "bfloat16":
        raise TypeError(f"Wrong type (bfloat16) of arguments for cupy_{name}")
    given = {} if name in ("cumsum", "cumprod") else {"keepdims": keepdims}
    with np.errstate(all="ignore"):
        return wrap(getattr(np, name)(operand(array), axis=axis, **given, **kwargs))


def _dtype_of_host(host):
    return check_dtype(host.dtype)


def _array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if hasattr(type(obj), "__cupy_get_ndarray__") and not isinstance(obj, ndarray):
        obj = obj.__cupy_get_ndarray__()
    if isinstance(obj, ndarray):
        wanted = obj.dtype if dtype is None else check_dtype(dtype)
        is_here = obj._device_id == cuda.current_device_id()
        is_alike = wanted == obj.dtype and (order in "KA" or obj.flags.c_contiguous)
        if not copy and is_here and is_alike:
            return obj
        return wrap(np.array(obj._host, dtype=wanted, order=order, ndmin=ndmin))  # across devices
    if isinstance(obj, (list, tuple)):
        obj = [each.get() if isinstance(each, ndarray) else each for each in obj]
    host = np.array(obj, dtype=dtype, order=order, ndmin=ndmin)
    return wrap(host.astype(_dtype_of_host(host), copy=False))


def _asarray(a, dtype=None, order=None, *, blocking=False):
    return _array(a, dtype, False, order or "K")


def _ascontiguousarray(a, dtype=None):
    return _array(a, dtype, False, "C")


def _asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def _empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def _empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    shape = prototype.shape if shape is None else shape
    return ndarray(shape, prototype.dtype if dtype is None else dtype)


def _zeros(shape, dtype=float, order="C"):
    return wrap(np.zeros(shape, check_dtype(dtype), order))


def _ones(shape, dtype=float, order="C"):
    return wrap(np.ones(shape, check_dtype(dtype), order))


def _full(shape, fill_value, dtype=None, order="C"):
    value = operand(fill_value)
    if dtype is None:
        dtype = (
            value.dtype if isinstance(value, (np.ndarray, np.generic)) else np.array(value).dtype
        )
    return wrap(np.full(shape, value, check_dtype(dtype), order))


def _from_dlpack(array, device=None, copy=None):
    if array.__dlpack_device__()[0] != 2:
        raise ValueError("CPU arrays cannot be directly imported to CuPy")
    return array


def _is_usable(name):
    return hasattr(np, name) and callable(getattr(np, name))


def make_functions():
    made = {name: ufunc(name, *rest) for name, rest in NAMES["ufuncs"].items() if _is_usable(name)}
    for name, parameters in NAMES["functions"].items():
        if _is_usable(name) and name not in made:
            made[name] = _function(name, parameters)
    for name in ("sum", "prod", "mean", "min", "max", "all", "any", "argmin", "argmax", "ravel",
                 "take", "repeat"):  # fmt: skip
        made[name] = _method(name)  # CuPy calls the method of whatever it is given
    made["amin"], made["amax"] = made["min"], made["max"]
    made |= {
        "where": _where, "matmul": _matmul, "array": _array, "asarray": _asarray,
        "asanyarray": _asarray, "ascontiguousarray": _ascontiguousarray, "asnumpy": _asnumpy,
        "empty": _empty, "empty_like": _empty_like, "zeros": _zeros, "ones": _ones, "full": _full,
        "from_dlpack": _from_dlpack, "_reduced": _reduced,
        "get_array_module": lambda *args: _module_of(args),
    }  # fmt: skip
    for name in ("absolute", "abs"):
        if name in made:
            made["abs"] = made["absolute"] = made[name]
            break
    return made


def _module_of(args):
    import cupy

    return cupy if any(isinstance(each, ndarray) for each in args) else np


__all__ = ["NAMES", "make_functions", "supports"]
