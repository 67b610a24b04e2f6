"""Kernels, which the C compiler of this machine compiles."""

import ast
import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from ._array import check_device, ndarray

_C_TYPES = {
    "float32": "float", "float64": "double", "int8": "signed char", "uint8": "unsigned char",
    "int32": "int", "uint32": "unsigned", "int64": "long long", "uint64": "unsigned long long",
    "int16": "short", "uint16": "unsigned short", "bool": "_Bool",
}  # fmt: skip
_NAMED = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64"}
_FLAGS = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-Wno-unknown-pragmas"]

_HEAD = """\
#include <tgmath.h>
#define __global__
#define __device__ static inline
#define __restrict__ restrict
struct Three { unsigned x, y, z; };
static struct Three blockIdx, threadIdx, blockDim, gridDim;
"""


@functools.cache
def _compiled(code, options):
    """Return the library made from `code`; products and sums are fused unless `options` forbid."""
    fuses = "fast" if "--fmad=false" not in options and "-fmad=false" not in options else "off"
    folder = Path(tempfile.gettempdir()) / "cupy-standin"
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256((code + fuses).encode()).hexdigest()[:20]
    path = folder / f"{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work, "kernel.c"), Path(work, "kernel.so")
            source.write_text(code)
            flags = [*_FLAGS, f"-ffp-contract={fuses}", *(["-mfma"] if fuses == "fast" else [])]
            done = subprocess.run(
                ["gcc", *flags, str(source), "-o", str(made), "-lm"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"NVRTC would fail:\n{done.stderr}\n{code}")
            made.replace(path)
    return ctypes.CDLL(str(path))


def _parameters(text):
    found = []
    for each in filter(None, map(str.strip, text.split(","))):
        kind, _, name = each.rpartition(" ")
        found.append((kind.strip(), name))
    return found


class ElementwiseKernel:
    """What is done to each element of the arguments."""

    def __init__(self, in_params, out_params, operation, name="kernel", reduce_dims=True,
                 preamble="", no_return=False, return_tuple=False, *, options=(), **kwargs):  # fmt: skip
        if kwargs.keys() - {"loop_prep", "after_loop"}:
            raise TypeError(f"unknown options {sorted(kwargs)}")
        self.params_in, self.params_out = _parameters(in_params), _parameters(out_params)
        self.nin = len(self.params_in)
        self.operation, self.name, self.options = operation, name, tuple(options)
        self.preamble = preamble

    def __call__(self, *args, size=None, stream=None, block_size=128):
        params = self.params_in + self.params_out
        if len(args) != len(params):
            raise TypeError(f"{self.name} takes {len(params)} arguments, not {len(args)}")
        types = {}
        for (kind, _), arg in zip(params, args, strict=True):
            if isinstance(arg, ndarray):
                check_device(arg)
                if kind in types and types[kind] != arg.dtype:
                    raise TypeError(f"Type is mismatched. {kind} {arg.dtype} {types[kind]}")
                types[kind] = arg.dtype
            elif isinstance(arg, np.ndarray) or not isinstance(
                arg, (bool, int, float, complex, np.generic)
            ):
                raise TypeError(f"Unsupported type {type(arg)}")
        sizes = {arg.size for arg in args if isinstance(arg, ndarray)}
        if len(sizes) != 1:
            raise ValueError(f"shapes differ: {sizes}")
        (size,) = sizes
        resolved = []
        for kind, _ in params:
            if len(kind) == 1:
                if kind not in types:
                    raise KeyError(kind)  # it occurs in scalars only
                resolved.append(types[kind])
            else:
                resolved.append(np.dtype(_NAMED.get(kind, kind)))
        self._run(params, resolved, args, size, types)
        outs = args[self.nin :]
        return outs[0] if len(outs) == 1 else outs

    def _run(self, params, dtypes, args, size, types):
        # Halves are computed with as float32 and rounded once, as their C++ classes do it.
        wide = [np.dtype(np.float32) if _is_half(each) else each for each in dtypes]
        names = {kind: _C_TYPES[(np.dtype("f4") if _is_half(d) else d).name]
                 for kind, d in types.items()}  # fmt: skip
        lines = [_HEAD, self.preamble]
        lines += [f"typedef {c_type} {kind};" for kind, c_type in names.items()]
        declared, given, hosts, defines = ["long n"], [ctypes.c_long(size)], [], []
        for (_, name), dtype, arg in zip(params, wide, args, strict=True):
            c_type = _C_TYPES[dtype.name]
            if isinstance(arg, ndarray):
                host = np.ascontiguousarray(arg._host.reshape(-1), dtype)
                hosts.append((arg, host))
                declared.append(f"{c_type} *{name}_p")
                given.append(ctypes.c_void_p(host.__array_interface__["data"][0]))
                defines.append(f"#define {name} {name}_p[i]")
            else:
                declared.append(f"{c_type} {name}")
                given.append(np.ctypeslib.as_ctypes_type(dtype)(dtype.type(arg).item()))
        lines += [f"void run({', '.join(declared)}) {{", *defines]
        lines += ["for (long i = 0; i < n; ++i) {", f"{self.operation};", "}", "}"]
        _compiled("\n".join(lines), self.options).run(*given)
        for arg, host in hosts[-len(self.params_out) :]:
            with np.errstate(all="ignore"):
                arg._host[...] = host.reshape(arg.shape)


def _is_half(dtype):
    return dtype.name in ("float16", "bfloat16")


def compile_using_nvrtc(source, options=(), arch=None, filename="kern.cu"):
    return repr((source, tuple(options))).encode(), None


class Module:
    def load(self, cubin):
        self._given = ast.literal_eval(cubin.decode())

    def get_function(self, name):
        kernel = RawKernel(self._given[0], name, self._given[1])
        return lambda grid, block, args: kernel(grid, block, args)


class RawKernel:
    """A CUDA function, run thread by thread: it may not wait for other threads."""

    def __init__(self, code, name, options=(), backend="nvrtc", translate_cucomplex=False, *,
                 enable_cooperative_groups=False, jitify=False):  # fmt: skip
        if not isinstance(options, tuple):
            raise TypeError(f"options is a tuple, not {type(options)}")
        self.code, self.name, self.options = code, name, options

    @property
    def attributes(self):
        return {"max_threads_per_block": 1024}

    def __call__(self, grid, block, args, *, shared_mem=0):
        grid, block = (tuple(each) + (1,) * (3 - len(each)) for each in (grid, block))
        assert grid[1:] == block[1:] == (1, 1)
        if not (0 < grid[0] < 2**31 and 0 < block[0] <= 1024):
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: grid {grid}, block {block}")
        pointers, kept = (ctypes.c_void_p * len(args))(), []
        num_bytes = 0
        for i, arg in enumerate(args):
            if isinstance(arg, ndarray):
                check_device(arg)
                value = np.array([arg.data.ptr])
            elif isinstance(arg, np.ndarray):
                if arg.size != 1:
                    raise TypeError(f"a numpy.ndarray of shape {arg.shape} as a kernel parameter")
                value = arg
            elif isinstance(arg, (bool, int, float, np.generic)):
                value = np.array([arg])
            else:
                raise TypeError(f"Unsupported type {type(arg)}")
            kept.append(value)
            num_bytes += value.nbytes
            pointers[i] = value.__array_interface__["data"][0]
        if num_bytes > 4096:
            raise RuntimeError(f"{num_bytes} bytes of parameters, where 4,096 are the limit")
        self._library().launch(grid[0], block[0], pointers)

    def _library(self):
        code = self.code.replace('extern "C"', "")
        declared = re.search(rf"void {self.name}\((.*?)\)\s*{{", code, re.DOTALL)[1]
        types = [re.sub(r"\b(const|__restrict__)\b|\w+\s*$", "", each).strip()
                 for each in declared.split(",")]  # fmt: skip
        passed = ", ".join(f"*({c_type} *)args[{i}]" for i, c_type in enumerate(types))
        launch = f"""
void launch(unsigned grid, unsigned block, void **args) {{
    gridDim.x = grid; blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
            {self.name}({passed});
}}
"""
        return _compiled(_HEAD + code + launch, self.options)
