"""Workflows, forms and the citation: valid by their schemas, and true of this repository."""

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from tests.test_environment import PROJECT, ROOT
from tests.test_recipes import RELEASE

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **dict.fromkeys(sorted(FORMS.glob("*.yml")), "github-issue-forms"),
    FORMS / "config.yml": "github-issue-config",
    ROOT / ".github" / "dependabot.yml": "dependabot",
    ROOT / "CITATION.cff": "citation-file-format",
}
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("schema", sorted(set(SCHEMAS.values())))
def test_files_are_valid(schema):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    command = [*check, *(str(path) for path in SCHEMAS if SCHEMAS[path] == schema)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def test_workflows_make_what_the_makefile_has():
    called = {
        target
        for path in WORKFLOWS
        for step in steps(path)
        for line in re.findall(
            r"\bmake ([^\n|;&]+)", re.sub(r"\$\{\{.*?}}", "", step.get("run", ""))
        )
        for target in line.split()
        if "=" not in target
    }
    assert {"test", "lint", "site-check"} <= called
    rules = re.findall(r"^([\w$()./%-]+):", MAKEFILE, re.M)
    patterns = [
        re.escape(rule.replace("$(VENV)", ".venv")).replace("%", r"[\w-]+") for rule in rules
    ]
    for target in called:
        assert any(re.fullmatch(pattern, target) for pattern in patterns), target


def test_the_oldest_and_the_newest_python_are_tested_with_both_libraries():
    (tests,) = (path for path in WORKFLOWS if path.name == "tests.yml")
    matrix = yaml.safe_load(tests.read_text())["jobs"]["tests"]["strategy"]["matrix"]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert len(matrix["python"]) == 3
    assert (matrix["python"][0], matrix["python"][-1]) == (named[0], named[-1])
    assert set(matrix["mpi"]) == {"mpich", "openmpi"}


def test_only_jobs_that_publish_may_write():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert name == "publish" or "permissions" not in job


def test_the_citation_is_that_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == RELEASE
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["keywords"] == PROJECT["keywords"]


def test_hooks_call_what_is_installed():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        module = hook["entry"].removeprefix("python -m ").split()[0]
        assert importlib.util.find_spec(module) is not None, hook["id"]
