"""The compiled kernels and the NumPy ones do the same, to the bit."""

import shutil

import numpy as np
import pytest

from mpistrat.optimizers import kernels, update
from mpistrat.optimizers.adam import _ADAM
from mpistrat.optimizers.sgd import _MOMENTUM, _NESTEROV, _PLAIN
from mpistrat.optimizers.update import Step, Target, slot_dtype
from tests.devices import assert_array_equal

RULES = {"sgd": _PLAIN, "momentum": _MOMENTUM, "nesterov": _NESTEROV, "adam": _ADAM}
CONSTANTS = {"rate": 0.1, "decay": 0.9, "gain_1": 0.1, "gain_2": 0.01, "epsilon": 1e-8}
DTYPES = (np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128)


def after_steps(rule, dtype, size, keep, factor):
    """Return weight and slots after three steps."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal(size).astype(dtype)
    slots = [np.zeros(size, slot_dtype(weight.dtype)) for _ in rule.kernel.slots]
    step = Step(tuple(CONSTANTS[name] for name in rule.kernel.constants), keep, factor)
    for _ in range(3):
        gradient = rng.standard_normal(size).astype(dtype)
        before = gradient.copy()
        update.update_on_host(rule, step, Target(weight, slots), gradient)
        assert_array_equal(gradient, before)
    return [weight, *slots]


@pytest.mark.parametrize(("keep", "factor"), [(1, 1), (0.9, 0.5)])
@pytest.mark.parametrize("size", [0, 1, 2**15 + 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_compiled_kernels_equal_numpy(monkeypatch, name, dtype, size, keep, factor):
    with_library = after_steps(RULES[name], dtype, size, keep, factor)
    monkeypatch.setattr(update, "_compiled_kernel", lambda kernel, dtype: None)
    in_numpy = after_steps(RULES[name], dtype, size, keep, factor)
    for ours, numpys in zip(with_library, in_numpy, strict=True):
        assert_array_equal(ours, numpys)


def test_the_library_is_there_where_it_could_be_made():
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler here")
    assert update._library() is not None, "install the package again: its kernels are old"


def test_an_older_library_is_not_used(monkeypatch):
    monkeypatch.setattr(update, "digest", lambda: "0" * len(kernels.digest()))
    assert update._library.__wrapped__() is None


@pytest.mark.parametrize("content", [b"", b"no library at all", b"\x7fELF" + bytes(60)])
def test_a_library_that_cannot_be_loaded_is_not_used(monkeypatch, tmp_path, content):
    (tmp_path / "_host_kernels.of-another-machine.so").write_bytes(content)
    monkeypatch.setattr(update, "__file__", str(tmp_path / "compiled.py"))
    assert update._library.__wrapped__() is None
