"""The package against the real CuPy, on machines without a GPU: names, signatures, kernels.

Needs the wheels of CuPy and NVRTC (``make test-cupy``), no driver.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from mpistrat.comm import device_groups
from mpistrat.cuda_api import COMPILER_OPTIONS, array_namespace
from mpistrat.optimizers import device_update, kernels

STANDIN = Path(__file__).parents[1] / "standin"
RULES = (kernels.SGD, kernels.SGD_MOMENTUM, kernels.SGD_NESTEROV, kernels.ADAM)
SOURCES = {
    **{
        f"{rule.name}-{dtype}": (device_update.update_source, (rule, dtype))
        for rule in RULES
        for dtype in device_update._STORAGE
    },
    **{f"squares-{char}": (device_update.squares_source, (char,)) for char in "fd"},
    **{f"join-{size}": (device_groups.join_source, (size,)) for size in (1, 2, 4, 8)},
}


def real_cupy():
    spec = importlib.util.find_spec("cupy")
    return spec is not None and "standin" not in str(spec.origin)


@pytest.fixture(scope="module")
def cupy():
    if not real_cupy():
        pytest.skip("needs the wheel of CuPy")
    return pytest.importorskip("cupy")


def ptx(cupy, code, options):
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "-arch=compute_90"))
    except Exception as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    found = nvrtc.getPTX(program)
    return found if isinstance(found, str) else found.decode()


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile_and_round_as_the_host_does(cupy, name):
    function, arguments = SOURCES[name]
    code, entry = function(*arguments)
    made = ptx(cupy, code, COMPILER_OPTIONS)
    assert f".entry {entry}(" in made
    assert "fma." not in made
    assert ".ftz" not in made
    assert "approx" not in made


def test_the_options_are_what_keeps_the_bits(cupy):
    """Without them NVRTC fuses, so the test above can fail."""
    code, _ = device_update.update_source(kernels.ADAM, "float32")
    assert "fma." in ptx(cupy, code, ())
    assert ".ftz" in ptx(cupy, code, ("--fmad=false", "-ftz=true"))


def test_parameters_of_a_launch_fit():
    columns = 3 + max(len(rule.slots) for rule in RULES)
    assert device_groups.table_dtype(columns).itemsize + 64 <= 4096


def test_the_names_that_the_package_uses_exist(cupy):
    for path in (
        "cuda.runtime.getDeviceCount", "cuda.runtime.getDevice", "cuda.runtime.memcpyAsync",
        "cuda.runtime.getDeviceProperties", "cuda.runtime.memcpyHostToDevice",
        "cuda.runtime.memcpyDeviceToHost", "cuda.Device", "cuda.Stream", "cuda.Event",
        "cuda.get_current_stream", "cuda.alloc_pinned_memory", "cuda.nvtx.RangePush",
        "cuda.compiler.compile_using_nvrtc", "cuda.function.Module.load", "from_dlpack",
        "cuda.function.Module.get_function", "asarray", "ndarray.get",
        "cuda.PinnedMemoryPointer", "cuda.MemoryPointer.device_id", "cuda.MemoryPointer.ptr",
        "random.default_rng",
    ):  # fmt: skip
        found = cupy
        for name in path.split("."):
            assert hasattr(found, name), path
            found = getattr(found, name)
    assert array_namespace().empty is not None


def test_nccl_is_found_as_a_module_or_says_why_not(cupy):
    from mpistrat.cuda_api import nccl_library

    try:
        library = nccl_library()
    except ImportError as error:
        assert "NCCL" in str(error)  # noqa: PT017
    else:
        assert {"NCCL_SUM", "NcclCommunicator", "get_unique_id"} <= set(dir(library))


def test_the_stand_in_has_the_names_of_this_cupy(cupy):
    """Run tools/cupy_names.py again where this fails for a newer CuPy."""
    from tools.cupy_names import names_of

    known = json.loads((STANDIN / "cupy" / "names.json").read_text())
    if known["version"] != cupy.__version__:
        pytest.skip(f"the stand-in is of CuPy {known['version']}, installed is {cupy.__version__}")
    assert names_of(cupy) == known
