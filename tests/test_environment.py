"""environment.yml asks for what pyproject.toml asks for, in the same versions."""

import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_CPU = yaml.safe_load((ROOT / "environment-cpu.yml").read_text())

CONDA_NAMES = {
    "build": "python-build",
    "cupy-cuda13x": "cupy",
    "isal": "python-isal",
    "lmdb": "python-lmdb",
    "matplotlib": "matplotlib-base",
    "xxhash": "python-xxhash",
}
ONLY_CONDA = {"python", "pip", "cuda-version", "c-compiler"}
EXTRAS = ("openmpi", "cuda13x", "jobs", "test", "docs")


def conda_requirements():
    """Return ``{name: (version, build)}``, the build being an empty string where none is named."""
    fields = [line.split() for line in CONDA["dependencies"]]
    return {f[0]: (f[1] if len(f) > 1 else "", f[2] if len(f) > 2 else "") for f in fields}


def pip_requirements():
    lines = [*PROJECT["dependencies"]]
    for extra in EXTRAS:
        lines += PROJECT["optional-dependencies"][extra]
    # conda's CuPy comes with NCCL.
    requirements = [Requirement(line) for line in lines if not line.startswith("nvidia-")]
    return {CONDA_NAMES.get(r.name, r.name): str(r.specifier) for r in requirements}


@pytest.mark.parametrize(("name", "version"), pip_requirements().items())
def test_conda_asks_for_the_version_of_pyproject(name, version):
    assert conda_requirements()[name][0] == version


def test_conda_asks_for_nothing_that_pyproject_does_not_know():
    assert conda_requirements().keys() - ONLY_CONDA == pip_requirements().keys()


def test_python_is_that_of_pyproject():
    assert conda_requirements()["python"][0] == PROJECT["requires-python"]


def test_h5py_is_built_with_the_mpi_of_the_environment():
    assert "openmpi" in conda_requirements()
    assert conda_requirements()["h5py"][1] == "mpi_openmpi*"


def test_cuda_support_of_open_mpi_is_on():
    assert CONDA["variables"]["OMPI_MCA_opal_cuda_support"] == "true"


def test_only_one_channel_is_used():
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]


def test_the_variant_without_a_gpu_differs_by_that_alone():
    gpu = [line for line in CONDA["dependencies"] if line.split()[0] in ("cupy", "cuda-version")]
    assert len(gpu) == 2
    assert [line for line in CONDA["dependencies"] if line not in gpu] == CONDA_CPU["dependencies"]
    own = {"dependencies": [], "variables": {}}
    assert {**CONDA, **own} == {**CONDA_CPU, **own}
    assert "variables" not in CONDA_CPU  # an Open MPI without CUDA refuses to start with it
