"""The documentation tells the truth: its code runs, and it has an entry for every public name."""

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import shutil

import pytest

import mpistrat as ms
from mpistrat.settings import Settings
from mpistrat.testing import launch
from tests import ROOT
from tests.programs.jobs.conftest import digits  # noqa: F401  the file that the pages read

PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not {"_build", "reference", "benchmarks"} & set(page.parts)
    ),
]
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n`]*)\n(.*?)^ *\2$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = "<!-- not run -->\n"
PRINTED = re.compile(r"^<!-- printed -->\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""What a page says that its code prints, on any number of ranks."""
FAILS = re.compile(
    r"^<!-- fails on (\d+) ranks -->\n<!-- not run -->\n```python\n(.*?)^```\n+```text\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)
"""A program that must fail, and what the page says that it prints."""
OPTIONAL = ("torch", "lightning", "accelerate", "jax", "optax", "autograd", "keras")
"""Packages without which the pages that import them are left out."""


def program(text):
    """Return the python blocks of a page as one program, each in its own lines of the page."""
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        if text[: match.start()].endswith(NOT_RUN):
            continue
        first = text[: match.start(1)].count("\n")
        block = match[1].split("\n")
        lines[first : first + len(block)] = block
    return "\n".join(lines)


def pages_with_code():
    # After the disagreement on that page, what mpistrat.torch.init has opened is closed.
    pages = sorted(PAGES, key=lambda page: page.name == "hangs.md")
    found = {str(page.relative_to(ROOT)): program(page.read_text()) for page in pages}
    missing = [each for each in OPTIONAL if importlib.util.find_spec(each) is None]
    needs_missing = re.compile(rf"^(import|from) ({'|'.join(missing)})\b", re.MULTILINE)
    return {
        name: code
        for name, code in found.items()
        if code.strip() and not (missing and needs_missing.search(code))
    }


EACH_PAGE = """
import os, runpy, sys
for page in sys.argv[1:]:
    os.chdir(os.path.dirname(page))
    runpy.run_path(page, run_name="__main__")
"""


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [None, 2], ids=["alone", "two_ranks"])
def test_the_code_of_each_page_runs(ranks, digits, tmp_path):  # noqa: F811
    pages = []
    for name, code in pages_with_code().items():
        folder = tmp_path / name  # which a traceback names
        (folder / "data").mkdir(parents=True)
        shutil.copy(digits, folder / "data" / "digits.h5")
        pages.append(folder / "page.py")
        pages[-1].write_text(code)
    done = launch.run(["-W", "error", "-c", EACH_PAGE, *pages], ranks, limit_s=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ["simulations", "large-models"])
def test_pages_run_where_rows_do_not_divide(name, ranks, tmp_path):
    page = tmp_path / "page.py"
    page.write_text(pages_with_code()[f"docs/guide/{name}.md"])
    done = launch.run(["-W", "error", page], ranks, limit_s=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def matches(pattern):
    pages = {str(page.relative_to(ROOT)): pattern.findall(page.read_text()) for page in PAGES}
    return [pytest.param(name, found, id=name) for name, found in pages.items() if found]


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [None, 2], ids=["alone", "two_ranks"])
@pytest.mark.parametrize(("name", "printed"), matches(PRINTED))
def test_a_page_prints_what_it_says(name, printed, ranks, tmp_path):
    page = tmp_path / "program.py"
    page.write_text(pages_with_code()[name])
    done = launch.run([page], ranks, limit_s=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(printed)


@pytest.mark.launches
@pytest.mark.parametrize(("name", "failing"), matches(FAILS))
def test_a_program_fails_as_its_page_says(name, failing, tmp_path):
    for ranks, code, said in failing:
        page = tmp_path / "program.py"
        page.write_text(code)
        done = launch.run(["program.py"], int(ranks), limit_s=60, cwd=tmp_path)
        assert done.returncode != 0
        for line in said.splitlines():
            assert line in done.stdout + done.stderr, name


def public_names(module=ms):
    names = {f"{module.__name__}.{name}" for name in module.__all__}
    inner = filter(inspect.ismodule, (getattr(module, name) for name in module.__all__))
    return names.union(*map(public_names, inner))


def documented_names():
    """Return the names with an entry, or with a page by a table that makes pages."""
    directive = re.compile(r"^\.\. (?:py:data|auto(?:function|class|exception)):: (\S+)$", re.M)
    table = re.compile(
        r"^\.\. autosummary::\n   :toctree: api\n.*?\n\n((?:   \S+\n)+)", re.M | re.S
    )
    names = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text()
        names.update(
            directive.findall(text), " ".join(table.findall(text)).replace("~", "").split()
        )
    return names


def modules_with_a_page():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return set(
        re.findall(r"^\.\. automodule:: (\S+)$", "".join(p.read_text() for p in pages), re.M)
    )


OF_FRAMEWORKS = tuple(
    f"mpistrat.{each}." for each in ("torch", "keras", "lightning", "transformers")
)


def test_every_public_name_has_an_entry_in_the_reference():
    assert public_names() - documented_names() - modules_with_a_page() == set()


def test_the_reference_has_no_entry_for_what_is_not_public():
    found = {name for name in documented_names() if not name.startswith(OF_FRAMEWORKS)}
    assert found - public_names() == set()


def test_the_reference_has_the_public_names_for_pytorch():
    torch = pytest.importorskip("mpistrat.torch", exc_type=ImportError)
    found = {name for name in documented_names() if name.startswith("mpistrat.torch.")}
    assert found == {f"mpistrat.torch.{name}" for name in torch.__all__}


def test_the_reference_has_the_public_names_for_keras():
    keras = pytest.importorskip("mpistrat.keras")
    found = {name for name in documented_names() if name.startswith("mpistrat.keras.")}
    assert found == {f"mpistrat.keras.{name}" for name in keras.__all__}


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_the_reference_has_the_public_names_for_trainers(name):
    module = importlib.import_module(f"mpistrat.{name}")
    found = {each for each in documented_names() if each.startswith(f"mpistrat.{name}.")}
    assert found == {f"mpistrat.{name}.{each}" for each in module.__all__}


def test_every_setting_is_in_the_table():
    table = (ROOT / "docs" / "reference" / "environment-variables.md").read_text()
    for field in dataclasses.fields(Settings):
        assert f"| `MPISTRAT_{field.name.upper()}` |" in table


LINK = re.compile(r"""(?:\]\(|src(?:set)?=")(?!https?:|\#)([^)\#"]+)""")


def test_links_and_pictures_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def code_blocks():
    for page in PAGES:
        for match in FENCE.finditer(page.read_text()):
            yield f"{page.relative_to(ROOT)}: {match[4][:40]!r}", match[3].strip(), match[4]


def test_each_block_of_code_names_its_language():
    assert [where for where, language, _ in code_blocks() if not language] == []


def test_no_line_of_code_is_too_long_to_read():
    # Output is shown as it is, and scrolls.
    blocks = [each for each in code_blocks() if not each[1].startswith(("{", "text"))]
    assert len(blocks) > 100
    assert [(where, s) for where, _, text in blocks for s in text.split("\n") if len(s) > 96] == []


def inventories():
    for path in sorted((ROOT / "docs" / "_inventories").glob("*.txt")):
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                yield path.stem, *line.split()


def test_inventories_name_what_the_packages_have():
    for package, name, role, address in inventories():
        assert role.startswith("py:")
        assert address.partition("#")[2] in ("", name)
        if package == "torch":
            pytest.importorskip("torch")
        found = pkgutil.resolve_name(
            name if "." in name or package != "python" else f"builtins.{name}"
        )
        assert inspect.isclass(found) or role != "py:class", name


def test_names_of_other_packages_in_docstrings_are_in_an_inventory():
    known = {name for _, name, *_ in inventories()}
    roots = "|".join({package for package, *_ in inventories()} - {"python"})
    named = re.compile(rf"(?<!`)`((?:{roots})\.[\w.]+)`(?!`)")
    sources = {path: path.read_text() for path in (ROOT / "mpistrat").rglob("*.py")}
    found = {name for text in sources.values() for name in named.findall(text)}
    assert "numpy.random.Generator" in found
    assert found - known == set()


def where_to_change():
    """Return (row, file, names) of each cell of the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Where do I change X?")[2].partition("\n## ")[0]
    for line in table.splitlines()[4:]:
        where = line.strip("|").rpartition("|")[2]
        for part in where.split(";"):
            file, *names = re.findall(r"`([^`]+)`", part)
            yield line, ROOT / file, names


def test_what_to_change_where_names_files_and_names_that_exist():
    rows = list(where_to_change())
    assert len({line for line, _, _ in rows}) >= 20
    for line, file, names in rows:
        assert file.is_file(), line
        for name in names:
            assert re.search(rf"\b{re.escape(name)}\b", file.read_text()), (name, line)


def test_before_the_first_release_nothing_installs_mpistrat_by_name():
    # The release checklist changes this, with the pages that it lists.
    if "not yet released" not in (ROOT / "README.md").read_text():
        pytest.skip("mpistrat has been released")
    sources = [*PAGES, *(ROOT / "mpistrat").rglob("*.py")]
    by_name = re.compile(r"pip install[^\n]*[ \"']mpistrat\b")
    assert [str(each) for each in sources if by_name.search(each.read_text())] == []


def test_the_release_checklist_lists_each_page_that_installs_from_the_clone():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Releases\n")[2]
    step = text.partition("\n3. ")[2].partition("\n4. ")[0]
    from_clone = re.compile(r'pip install (?:-\S+ )*"?\.(?:\[|\s|`)')
    found = {str(page.relative_to(ROOT)) for page in PAGES if from_clone.search(page.read_text())}
    assert found == set(re.findall(r"README\.md|docs/[\w/-]+\.md", step))
