"""What a checkout and an installation of it consist of."""

import importlib.metadata
import os
import re

import pytest

import mpistrat as ms
from tests import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = ("train", "test", "test-%", "lint", "types", "bench", "docs", "clean", "help")


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
    assert installed == ms.__version__


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
