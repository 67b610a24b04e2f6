"""The array class, which host code cannot read by accident."""

import numpy as np

from . import cuda

GARBAGE = 0xAB
_CHARS = "?bBhHiIlLqQefdFD"


def supports(dtype):
    return dtype.char in _CHARS or dtype.name == "bfloat16"


def check_dtype(dtype):
    dtype = np.dtype(dtype)
    if not supports(dtype):
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype.newbyteorder("=")


class _Memory:
    def __init__(self, array, device_id):
        self.ptr = array.__array_interface__["data"][0]
        self.device_id = device_id
        self.device = cuda.Device(device_id)
        self._array = array  # keeps it alive


def wrap(host, device_id=None):
    """Return memory of the current device, with what NumPy has computed."""
    host = np.asarray(host)
    if not supports(host.dtype):
        raise TypeError(f"no loop of CuPy gives {host.dtype}")
    found = object.__new__(ndarray)
    found._host = host
    found._device_id = cuda.current_device_id() if device_id is None else device_id
    found._base = None
    return found


class ndarray:  # noqa: N801
    """An array in the memory of a device."""

    __array_priority__ = 100
    __slots__ = ("__weakref__", "_base", "_device_id", "_host")
    __hash__ = None

    def __new__(cls, shape, dtype=float, memptr=None, strides=None, order="C"):
        host = np.empty(shape, check_dtype(dtype), order=order)
        host.reshape(-1, order="A").view(np.uint8).fill(GARBAGE)
        return wrap(host)

    def _view(self, host):
        found = wrap(host, self._device_id)
        if np.shares_memory(host, self._host):
            found._base = self if self._base is None else self._base
        return found

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: _Flags(self._host.flags))
    base = property(lambda self: self._base)
    device = property(lambda self: cuda.Device(self._device_id))
    data = property(lambda self: _Memory(self._host, self._device_id))
    T = property(lambda self: self._view(self._host.T))
    mT = property(lambda self: self._view(self._host.mT))  # noqa: N815
    real = property(lambda self: self._view(self._host.real))
    imag = property(lambda self: self._view(self._host.imag))
    cstruct = property(lambda self: self)

    # To the host: only when asked.

    def get(self, stream=None, order="C", out=None, blocking=True):
        cuda.synchronize_all()
        if out is not None:
            out[...] = self._host
            return out
        return np.array(self._host, order="C" if order is None else order)

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"{arr.dtype} {arr.shape} is set to {self.dtype} {self.shape}")
        self._host[...] = arr

    def item(self, *index):
        return self._host.item(*index)

    def tolist(self):
        return self._host.tolist()

    def tobytes(self, order="C"):
        return self._host.tobytes(order)

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __complex__(self):
        return complex(self.item())

    def __bool__(self):
        return bool(self._host)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        return repr(self._host)

    def __str__(self):
        return str(self._host)

    def __format__(self, spec):
        return format(str(self._host), spec) if self.ndim else format(self.item(), spec)

    def __reduce__(self):
        return _rebuilt, (self._host,)

    def __deepcopy__(self, memo):
        return self.copy()

    __copy__ = __deepcopy__

    # Other libraries.

    @property
    def __cuda_array_interface__(self):
        return self._host.__array_interface__ | {"version": 3, "stream": 1}

    def __dlpack_device__(self):
        return (2, self._device_id)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        raise BufferError("the stand-in exports no memory")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        import cupy

        function = getattr(cupy, ufunc.__name__, None)
        if function is None or method not in ("__call__", "reduce"):
            return NotImplemented
        for each in (*inputs, *kwargs.get("out", ())):
            known = hasattr(each, "__cupy_get_ndarray__") or isinstance(
                each, (ndarray, np.ndarray, np.generic, bool, int, float, complex)
            )
            if not known:
                return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        if method == "reduce":
            raise NotImplementedError(f"numpy.{ufunc.__name__}.reduce of a CuPy array")
        if ufunc.__name__ in _COMPARISONS:  # NumPy passes its scalars as arrays there
            inputs = [each.item() if _is_number(each) else each for each in inputs]
        return function(*inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        import cupy

        own = getattr(cupy, function.__name__, None)
        if own is None or not all(issubclass(each, (ndarray, np.ndarray)) for each in types):
            return NotImplemented
        return own(*args, **kwargs)

    # Elements.

    def _index(self, index):
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, np.ndarray) and index.ndim:
            raise IndexError(f"Unsupported type {type(index)}")
        return operand(index) if isinstance(index, ndarray) else index

    def __getitem__(self, index):
        check_device(self)
        found = self._host[self._index(index)]
        # An element is a 0-d view.
        if not isinstance(found, np.ndarray):
            found = self._host[(*(index if isinstance(index, tuple) else (index,)), ...)]
        return self._view(found)

    def __setitem__(self, index, value):
        check_device(self)
        self._host[self._index(index)] = operand(value)

    def fill(self, value):
        self._host.fill(operand(value))

    # Form.

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 else shape
        if not isinstance(shape, (int, np.integer, tuple, list)):
            raise TypeError(f"a shape is no {type(shape)}")
        return self._view(self._host.reshape(shape, order=order))

    def ravel(self, order="C"):
        return self._view(self._host.ravel(order))

    def flatten(self, order="C"):
        return self._view(self._host.flatten(order))

    def transpose(self, *axes):
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1, axis2):
        return self._view(self._host.swapaxes(axis1, axis2))

    def squeeze(self, axis=None):
        return self._view(self._host.squeeze(axis))

    def view(self, dtype=None, array_class=None):
        if dtype is None:
            return self._view(self._host.view())
        return self._view(self._host.view(check_dtype(dtype)))

    def copy(self, order="C"):
        return wrap(self._host.copy(order))

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        dtype = check_dtype(dtype)
        if not copy and dtype == self.dtype and (order == "K" or self._host.flags.c_contiguous):
            return self
        check_device(self)
        with np.errstate(all="ignore"):
            return wrap(self._host.astype(dtype, order=order, casting=casting or "unsafe"))

    def take(self, indices, axis=None, out=None):
        return wrap(self._host.take(operand(indices), axis))

    def repeat(self, repeats, axis=None):
        return wrap(self._host.repeat(operand(repeats), axis))

    def nonzero(self):
        return tuple(map(wrap, self._host.nonzero()))

    def clip(self, min=None, max=None, out=None):
        return wrap(self._host.clip(operand(min), operand(max)))

    def dot(self, b, out=None):
        import cupy

        return cupy.dot(self, b)

    def conj(self):
        return wrap(self._host.conj())

    conjugate = conj

    def round(self, decimals=0, out=None):
        return wrap(self._host.round(decimals))


class _Flags:
    def __init__(self, flags):
        self.c_contiguous = flags.c_contiguous
        self.f_contiguous = flags.f_contiguous
        self.forc = flags.forc
        self.owndata = flags.owndata

    def __getitem__(self, name):
        return getattr(self, name.lower())


def _rebuilt(host):
    return wrap(host.copy())


def check_device(array):
    if array._device_id != cuda.current_device_id():
        raise ValueError(
            f"The device where the array resides ({array._device_id}) is different from the current "
            f"device ({cuda.current_device_id()}). Peer access is unavailable between these devices."
        )


_COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")


def _is_number(value):
    return isinstance(value, np.ndarray) and not value.ndim


def operand(value):
    """Return what NumPy computes with for an operand that CuPy takes."""
    if isinstance(value, ndarray):
        check_device(value)
        return value._host
    if hasattr(type(value), "__cupy_get_ndarray__"):
        return operand(value.__cupy_get_ndarray__())
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if value is None or isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, np.generic) and supports(value.dtype):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _add_reductions():
    def define(name):
        def method(self, axis=None, dtype=None, out=None, keepdims=False):
            import cupy

            given = {} if dtype is None else {"dtype": dtype}
            found = cupy._reduced(name, self, axis=axis, keepdims=keepdims, **given)
            if out is not None:
                out[...] = found
                return out
            return found

        method.__name__ = name
        setattr(ndarray, name, method)

    for name in ("sum", "prod", "mean", "cumsum", "cumprod"):
        define(name)

    def define_short(name):
        def method(self, axis=None, out=None, keepdims=False):
            import cupy

            return cupy._reduced(name, self, axis=axis, keepdims=keepdims)

        method.__name__ = name
        setattr(ndarray, name, method)

    for name in ("min", "max", "all", "any", "argmin", "argmax"):
        define_short(name)


def _add_operators():
    names = {
        "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide",
        "floordiv": "floor_divide", "mod": "remainder", "pow": "power", "and": "bitwise_and",
        "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
        "matmul": "matmul",
    }  # fmt: skip

    def define(short, function):
        def forward(self, other):
            return _call(function, self, other)

        def backward(self, other):
            return _call(function, other, self)

        def in_place(self, other):
            import cupy

            getattr(cupy, function)(self, other, out=self)
            return self

        setattr(ndarray, f"__{short}__", forward)
        setattr(ndarray, f"__r{short}__", backward)
        if function != "matmul":  # Python makes a new array of a @= b
            setattr(ndarray, f"__i{short}__", in_place)

    def _call(function, left, right):
        import cupy

        own, other = (left, right) if isinstance(left, ndarray) else (right, left)
        if not isinstance(other, ndarray):
            if _leaves_to(own, other):
                return NotImplemented
            if function != "matmul":
                return getattr(np, function)(left, right)  # which asks each operand in turn
        return getattr(cupy, function)(left, right)

    def _leaves_to(own, other):
        try:
            return other.__array_ufunc__ is None
        except AttributeError:
            return getattr(other, "__array_priority__", 0) > own.__array_priority__

    for short, function in names.items():
        define(short, function)
    for short, function in {
        "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
        "ge": "greater_equal",
    }.items():  # fmt: skip
        setattr(
            ndarray, f"__{short}__", lambda self, other, name=function: _call(name, self, other)
        )
    for short, function in {
        "neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert",
    }.items():  # fmt: skip
        setattr(ndarray, f"__{short}__", lambda self, name=function: _call_one(name, self))

    def _call_one(function, value):
        import cupy

        return getattr(cupy, function)(value)


_add_reductions()
_add_operators()
