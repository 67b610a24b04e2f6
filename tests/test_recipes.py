"""The recipes in packaging/ ask for what pyproject.toml asks for, and build one version."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.test_environment import CONDA_NAMES, PROJECT, ROOT, tomllib

RECIPES = ROOT / "packaging"
CONDA = yaml.safe_load((RECIPES / "conda" / "recipe.yaml").read_text())
VARIANTS = yaml.safe_load((RECIPES / "conda" / "variants.yaml").read_text())
SPACK = ast.parse((RECIPES / "spack" / "package.py").read_text())
(EASYCONFIG,) = (RECIPES / "easybuild").glob("*.eb")
CONTAINERS = sorted((RECIPES / "apptainer").glob("*.def"))
MODULE = RECIPES / "modulefile" / "mpistrat.lua"

RELEASE = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
NEEDED = {Requirement(line).name: Requirement(line) for line in PROJECT["dependencies"]}
OPTIONAL = {
    Requirement(line).name: Requirement(line)
    for extra in ("compression", "cuda12x", "torch")
    for line in PROJECT["optional-dependencies"][extra]
    if not line.startswith("nvidia-")  # which other packagers have with CuPy
}
BUILD = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
]


def conda_names(requirements):
    names = {**CONDA_NAMES, "cupy-cuda12x": "cupy", "torch": "pytorch"}
    return {names.get(each.name, each.name): str(each.specifier) for each in requirements}


def conda_section(name):
    """Return ``{package: version}`` of a section of the recipe."""
    lines = [line.split() for line in CONDA["requirements"][name] if not line.startswith("${{")]
    return {line[0]: line[1] if len(line) > 1 else "" for line in lines}


def spack_dependencies():
    """Return ``{package: (version, type, when)}`` as package.py writes them."""
    found = {}
    for node in ast.walk(SPACK):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "depends_on":
            name, _, version = ast.literal_eval(node.args[0]).partition("@")
            details = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
            found.setdefault(name, []).append((version, details))
    return found


def spack_name(name):
    names = {"cupy-cuda12x": "py-cupy"}
    return names.get(name, "py-" + name.replace("_", "-"))


def test_the_conda_recipe_runs_with_what_the_package_needs():
    run = conda_section("run")
    assert run.pop("python") == PROJECT["requires-python"]
    assert run == conda_names(NEEDED.values())
    assert "${{ mpi }}" in CONDA["requirements"]["run"]


def test_the_conda_recipe_limits_what_may_be_there():
    assert conda_section("run_constraints") == conda_names(OPTIONAL.values())


def test_the_conda_recipe_builds_with_what_the_build_needs():
    host = conda_section("host")
    assert host.keys() - {each.name for each in BUILD} == {"python", "pip"}
    assert {each.name: str(each.specifier) for each in BUILD}.items() <= host.items()


def test_the_conda_recipe_has_a_variant_for_each_library_and_python():
    assert set(VARIANTS["mpi"]) == {"mpich", "openmpi"} <= PROJECT["optional-dependencies"].keys()
    built = {version.split(".*")[0] for version in VARIANTS["python"]}
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line}
    assert built == named


@pytest.mark.parametrize("requirement", [*NEEDED.values(), *OPTIONAL.values()], ids=str)
def test_the_spack_package_depends_on(requirement):
    lowest = str(requirement.specifier).removeprefix(">=") + ":"
    entries = [
        each
        for each in spack_dependencies()[spack_name(requirement.name)]
        if each[1].get("type") != "build"
    ]
    assert {version for version, _ in entries} == {lowest}
    assert all("when" in each for _, each in entries) == (
        requirement.name in OPTIONAL or requirement.marker is not None
    )


def test_the_spack_package_depends_on_nothing_else():
    known = {spack_name(each.name) for each in [*NEEDED.values(), *OPTIONAL.values(), *BUILD]}
    found = spack_dependencies()
    assert found.keys() - known == {"c", "mpi", "python"}
    assert found["python"][0][0] == PROJECT["requires-python"].removeprefix(">=") + ":"
    for each in BUILD:
        lowest = str(each.specifier).removeprefix(">=") + ":"
        assert (lowest, {"type": "build"}) in found[spack_name(each.name)]


def easyconfig():
    names = {"SOURCE_PY3_WHL": "%(name)s-%(version)s-py3-none-any.whl"}
    exec(compile(EASYCONFIG.read_text(), EASYCONFIG, "exec"), names)
    return names


def test_the_easyconfig_has_what_the_package_needs():
    config = easyconfig()
    bundled = {"numpy": "SciPy-bundle", "rich": "Python-bundle-PyPI"}
    bundled |= {"threadpoolctl": "Python-bundle-PyPI", "isal": "python-isal"}
    bundled |= {"xxhash": "python-xxhash"}
    given = {name: version for name, version, *_ in config["dependencies"] + config["exts_list"]}
    for requirement in NEEDED.values():
        name = bundled.get(requirement.name, requirement.name)
        assert name in given, requirement
        if not name.endswith(("bundle", "PyPI")):
            assert given[name] in requirement.specifier, requirement
    assert given["Python"] in SpecifierSet(PROJECT["requires-python"])
    used = {bundled.get(name, name) for name in NEEDED} | {"Python", "setuptools", "mpistrat"}
    assert given.keys() == used


def test_all_recipes_build_one_version():
    config = easyconfig()
    spack = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(SPACK)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "version"
    ]
    assert CONDA["context"]["version"] == config["version"] == RELEASE
    assert spack == ["main", RELEASE]
    toolchain = "{name}-{version}".format(**config["toolchain"])
    assert EASYCONFIG.stem == f"mpistrat-{RELEASE}-{toolchain}"
    assert f'local version = "{RELEASE}"' in MODULE.read_text()


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_a_container_installs_the_version_with_extras_that_exist(path):
    text = path.read_text()
    (installed,) = re.findall(r'pip install [^"]*"([^"]+)"', text)
    requirement = Requirement(installed)
    assert requirement.name == PROJECT["name"]
    assert str(requirement.specifier) == f"=={RELEASE}"
    assert requirement.extras <= PROJECT["optional-dependencies"].keys()
    assert f"image.version {RELEASE}" in text
    sections = re.findall(r"^%(\w+)", text, re.M)
    assert {"post", "environment", "test", "labels"} == set(sections)


def test_recipes_describe_the_project_in_the_same_words():
    config = easyconfig()
    said = PROJECT["description"]
    assert CONDA["about"]["summary"] == said
    assert config["description"].rstrip(".") == said
    assert said in MODULE.read_text()
    package = next(node for node in SPACK.body if isinstance(node, ast.ClassDef))
    assert ast.get_docstring(package).rstrip(".") == said
    assert CONDA["about"]["license"] == PROJECT["license"]


@pytest.mark.parametrize("path", [EASYCONFIG, RECIPES / "spack" / "package.py"], ids=str)
def test_the_archive_is_that_of_the_project(path):
    assert f"{PROJECT['urls']['Source']}/releases/download/v" in path.read_text()


@pytest.mark.skipif(not (shutil.which("luac") or shutil.which("luac5.4")), reason="needs Lua")
def test_lua_reads_the_module_file():
    program = shutil.which("luac") or shutil.which("luac5.4")
    subprocess.run([program, "-p", Path(MODULE)], check=True, timeout=60)
