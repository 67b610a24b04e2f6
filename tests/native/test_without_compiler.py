"""An installation that was made without a C compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat
from mpistrat.testing import launch

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import numpy as np
import mpistrat as ms

for _ in range(2):
    strategy = ms.MPIStrategy()
    with strategy.scope():
        weight = ms.Variable(np.zeros(10_000, np.float32))
        optimizer = ms.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(10_000), weight)]))
    assert (weight.numpy() == -strategy.num_replicas_in_sync).all()
if strategy.extended._collectives.rank == 0:
    print(ms.__file__)
"""
DOCTOR = "import sys; from mpistrat.cli import main; sys.exit(main(['doctor', '--json']))"

pytestmark = pytest.mark.launches


@pytest.fixture
def uncompiled(tmp_path):
    """Return a function that runs a program with a copy of the package without its libraries."""
    package = Path(mpistrat.__file__).parent
    shutil.copytree(package, tmp_path / "mpistrat", ignore=shutil.ignore_patterns("*.so"))

    def run(program, ranks):
        (tmp_path / "job.py").write_text(program)
        return launch.run([tmp_path / "job.py"], ranks, 60)

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_ranks_are_warned_once(uncompiled, tmp_path, ranks):
    done = uncompiled(JOB, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "mpistrat" / "__init__.py")
    assert done.stderr.count("RuntimeWarning: mpistrat was installed without") == (ranks > 1)


def test_the_doctor_warns_with_the_remedy(uncompiled):
    report = json.loads(uncompiled(DOCTOR, 2).stdout)
    (found,) = [each for each in report["findings"] if each["topic"] == "compiled kernels"]
    assert found["level"] == "warning"
    assert "reductions in shared memory and optimizer updates" in found["seen"]
    assert "C compiler" in found["remedy"]
    assert "pip install" in found["remedy"]


def test_steps_on_devices(uncompiled, tmp_path, monkeypatch):
    # Arrays of devices are described without compiled code, so their steps are prepared.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "standin"))
    monkeypatch.setenv("FAKE_CUPY_GPUS", "1")
    on_device = JOB.replace("np.ones(10_000)", "cupy.ones(10_000, cupy.float32)")
    on_device = on_device.replace("import numpy as np", "import cupy\nimport numpy as np")
    done = uncompiled(on_device.replace("MPIStrategy()", 'MPIStrategy(device="gpu")'), 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wheel_holds_no_file_of_an_earlier_build(tmp_path):
    copy_sources(tmp_path)
    stale = tmp_path / "build" / "lib" / "mpistrat" / "native" / "gone.c"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", "build/lib"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    assert not stale.exists()
    assert (stale.parent / "module.c").exists()


@pytest.mark.slow
def test_it_is_built_without_a_compiler(tmp_path):
    copy_sources(tmp_path)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    without = os.environ | {"CC": "/nonexistent/cc"}
    done = subprocess.run(command, cwd=tmp_path, env=without, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    assert not list((tmp_path / "mpistrat").rglob("*.so"))


def copy_sources(tmp_path):
    for name in ("mpistrat", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for library in (tmp_path / "mpistrat").rglob("*.so"):
        library.unlink()
