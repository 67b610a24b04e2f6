"""What importing the package does not do."""

import ast
import os
import subprocess
import sys

import pytest

from mpistrat.testing.launch import environment

pytestmark = pytest.mark.launches


MAKE_STRATEGY = """
import mpistrat as ms
try:
    ms.MPIStrategy()
except (ValueError, ms.errors.LaunchError) as error:
    print(error)
"""


def python(code, **variables):
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(variables),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.quick
def test_import_starts_no_mpi_and_imports_neither_cupy_nor_h5py():
    code = """
import sys, mpistrat
print(sorted({"mpi4py.MPI", "h5py", "cupy", "torch", "matplotlib"} & set(sys.modules)))
"""
    assert python(code).strip() == "[]"


def test_a_script_without_a_strategy_needs_no_mpi_library(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text('raise ImportError("no MPI library here")')
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import numpy as np, mpistrat as ms
v = ms.Variable(np.ones(2)); o = ms.optimizers.SGD(0.5); m = ms.metrics.Mean()
for x in ms.data.Dataset.range(8).batch(4):
    m.update_state(x)
o.apply_gradients([(np.ones(2), v)])
ms.Checkpoint(v=v, o=o).write({str(tmp_path / "c.h5")!r})
assert ms.get_replica_context().all_reduce("sum", 2) == 2
strategy = ms.OneDeviceStrategy()
with strategy.scope():
    w = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
strategy.run(lambda: w.assign(3.0))
print(m.result(), v.numpy().tolist(), float(w))
try:
    ms.MPIStrategy()
except ImportError as error:
    print(error)
"""
    assert python(code).split("\n")[:2] == ["3.5 [0.5, 0.5] 3.0", "no MPI library here"]


def test_import_adds_little_to_numpy():
    """Count what is loaded, by whom: seconds depend on the machine."""
    code = """
import sys, numpy
before = set(sys.modules)
import mpistrat
new = set(sys.modules) - before
print(sorted({name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)))
print(len(new))
"""
    packages, count = python(code).splitlines()
    # Of numpy this is numpy.typing.
    allowed = "array_api_compat ml_dtypes mpi4py mpistrat numpy optree typing_extensions xxhash"
    assert set(ast.literal_eval(packages)) <= set(allowed.split())
    assert int(count) < 450


def test_unknown_settings_are_refused():
    code = MAKE_STRATEGY
    assert "MPISTRAT_TIMEOUT_S" in python(code, MPISTRAT_TIMEOUTS="3")
    assert "cannot be 'soon'" in python(code, MPISTRAT_TIMEOUT_S="soon")


def test_lonely_slurm_tasks_are_refused():
    if "SLURM_JOB_ID" in os.environ:
        pytest.skip("inside a Slurm job")
    code = MAKE_STRATEGY
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    text = python(code, **step)
    assert "--mpi=pmi2" in text
    assert "--mpi=pmix" in text
    assert python(code + "\nprint('fine')", SLURM_NTASKS="4").strip() == "fine"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_at_once(system):
    code = f"import sys; sys.platform = {system!r}; import mpistrat"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: mpistrat runs on Linux, and this is {system}: it needs")
    assert "numpy" not in result.stderr
