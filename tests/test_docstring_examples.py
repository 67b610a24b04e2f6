"""Every public function and class has an example in its docstring, and the examples run."""

import doctest
import inspect
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch
from tests import ROOT
from tests.programs.jobs.conftest import digits  # noqa: F401  the file that examples read
from tests.test_docstrings import PASSIVE, public_methods

try:
    import torch

    import mpistrat.torch as mst
except ImportError:
    torch = mst = None

MODULES = [
    *(ms, ms.data, ms.optimizers, ms.optimizers.schedules, ms.layers, ms.metrics),
    *(ms.gradients, ms.testing, *([] if mst is None else [mst])),
]
LEFT_OUT = re.compile(r"Deprecated\.|Has no effect|to be overridden")
"""Methods without an example: for old programs, for other strategies."""
CALLED_BY_OTHERS = ("HDF5Reader", "HDF5Writer", "StrategyTests")
"""Classes whose methods torch or pytest calls."""


def public_objects():
    """Return the public functions and classes by name, each once."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isfunction(member) or inspect.isclass(member):
                found.setdefault(member, f"{module.__name__}.{name}")
    return {name: member for member, name in found.items()}


def examples_of(member):
    """Return the code of the examples in the docstring of `member`."""
    text = inspect.getdoc(member) or ""
    _, _, section = text.partition("Examples\n--------\n")
    return "".join(each.source for each in doctest.DocTestParser().get_examples(section))


def shown_with(name, method):
    """Return the examples of `method`, and of all public classes that have it under `name`."""
    classes = [
        each
        for each in public_objects().values()
        if inspect.isclass(each) and _function(getattr(each, name, None)) is _function(method)
    ]
    return examples_of(method) + "".join(map(examples_of, classes))


def _function(method):
    return getattr(method, "__func__", method)


def test_each_public_function_and_class_has_an_example():
    objects = public_objects()
    assert {"mpistrat.MPIStrategy", "mpistrat.latest_checkpoint"} <= objects.keys()
    assert [name for name, member in objects.items() if not examples_of(member)] == []


def test_each_public_method_has_an_example_or_is_called_in_that_of_its_class():
    missing = set()
    for path, cls in public_objects().items():
        if inspect.isfunction(cls) or issubclass(cls, PASSIVE) or path.endswith(CALLED_BY_OTHERS):
            continue
        for full_name, method in public_methods(path, cls):
            name = full_name.rpartition(".")[2]
            if isinstance(inspect.getattr_static(cls, name), property):
                continue
            is_shown = f".{name}(" in shown_with(name, method)
            if not is_shown and not LEFT_OUT.search(method.__doc__ or ""):
                missing.add(method.__qualname__)
    assert missing == set()


@pytest.mark.launches
def test_the_examples_run(digits, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    shutil.copy(digits, tmp_path / "data" / "digits.h5")
    variables = {"PYTHONPATH": str(ROOT)}  # of this module
    command = ["-W", "error", "-m", __name__]
    done = launch.run(command, limit_s=60, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^(\d{3}) examples$", done.stdout, re.MULTILINE)


def main():
    """Run all examples; return how many have failed."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    names = {"np": np, "ms": ms, "signal": signal, "os": os, "strategy": ms.MPIStrategy()}
    if torch is not None:
        import safetensors.torch

        names |= {"torch": torch, "mst": mst, "os": os, "safetensors": safetensors}
    finder = doctest.DocTestFinder(recurse=False)
    # The group that the other examples of PyTorch use is made by that of init.
    for name, member in sorted(
        public_objects().items(), key=lambda item: "torch.init" not in item[0]
    ):
        methods = [] if inspect.isfunction(member) else [m for _, m in public_methods(name, member)]
        for each in (member, *methods):
            if examples_of(each):
                (test,) = finder.find(each, f"{name}.{each.__name__}", globs=dict(names))
                runner.run(test)
    print(f"{runner.tries} examples")
    return int(runner.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
