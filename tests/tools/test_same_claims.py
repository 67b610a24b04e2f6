"""Pages that say the same thing say it with the same words and numbers."""

import re

import pytest

from tests import ROOT
from tools.house import layers

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
LINES = re.compile(rf"({'|'.join(NUMBERS)})\s+(?:changed\s+)?lines?\b", re.IGNORECASE)
CHANGES = {
    "from PyTorch": {
        "README.md": "| PyTorch with DDP over gloo |",
        "docs/coming-from/pytorch.md": "A program that trains with DistributedDataParallel",
        "docs/guide/pytorch.md": "A program that uses gloo",
    },
    "from Keras": {
        "README.md": "| Keras, or `tf.distribute` |",
        "docs/coming-from/keras.md": "A Keras program that uses",
        "docs/coming-from/tf-distribute.md": "For `model.fit`",
    },
}
"""How each page begins the sentence that says how many lines change."""
SAME_ROWS = {"ranks disagree": "different calls"}
"""Rows of README's comparison that docs/why.md names differently."""
WORDS = {"autodiff": "autograd", "TensorFlow": "TF", "the job": "job", "or JAX": "JAX"}
"""Words of docs/why.md, and what README's narrower table has for them."""


def page(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_the_same_number_of_lines_on_each_page(change):
    said = {}
    for name, begin in CHANGES[change].items():
        _, found, rest = page(name).partition(begin)
        assert found, f"{name} has no sentence that begins {begin!r}"
        match = LINES.search(re.split(r"\n\||\n\n", rest)[0])
        assert match, f"{name} does not say how many lines change"
        said[name] = NUMBERS[match[1].lower()]
    assert len(set(said.values())) == 1, said


def test_the_change_from_pytorch_is_as_long_as_the_pages_say():
    diff = page("docs/coming-from/pytorch.md").partition("```diff\n")[2].partition("```")[0]
    assert len(re.findall(r"^\+", diff, re.MULTILINE)) == 2


def comparison(name):
    """Return the cells of the tables of a page below "Compared with", by row and column."""
    cells = {}
    columns = []
    for line in page(name).partition("## Compared with")[2].splitlines():
        row = [each.strip() for each in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = [each.rstrip("¹") for each in row]
        elif not set(line) <= set("|- "):
            cells.update({(row[0], column): row[i] for i, column in enumerate(columns) if i})
    return cells


def plain(cell):
    cell = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    for old, new in WORDS.items():
        cell = cell.replace(old, new)
    return set(re.findall(r"\w+", cell.lower()))


def test_the_comparison_of_the_readme_is_that_of_why():
    """A cell of README has no word that the cell of why.md lacks."""
    short, long = comparison("README.md"), comparison("docs/why.md")
    rows = {row for row, _ in short}
    shared = {row for row in rows if any(SAME_ROWS.get(row, row) == known for known, _ in long)}
    assert shared >= {"arrays", "gradients", "ranks disagree", "a rank dies"}
    for (row, column), cell in short.items():
        if row in shared:
            known = long[SAME_ROWS.get(row, row), column]
            assert plain(cell) <= plain(known), f"{row}, {column}: {cell!r} against {known!r}"


def test_the_page_for_mpi4py_has_the_ratios_of_the_page_on_reductions():
    text = page("docs/benchmarks/reductions.md").partition("| array | MPICH")[2]
    table = {
        row[0]: (float(row[1].split(" / ")[0]), float(row[3]))
        for row in (re.split(r" *\| *", line.strip("| ")) for line in text.splitlines()[2:9])
    }
    small = [table["8 B"], table["1 KiB"]]
    (a, b), (c, d) = [sorted(round(1 / row[column]) for row in small) for column in (0, 1)]
    sentence = (
        f"up to 1 KiB takes about {a} to {b} times as long with MPICH and {c} to {d} times as long "
        "with Open MPI"
    )
    assert sentence in " ".join(page("docs/coming-from/mpi4py.md").split())
    assert min(min(row) for size, row in table.items() if size.endswith("MiB")) > 0.9


def test_the_pages_count_the_layers_of_the_package():
    number = {11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}[len(list(layers()))]
    assert f"in {number} layers" in page("CONTRIBUTING.md")
    assert f"{number} layers" in page("docs/architecture.md").lower()


def test_the_sidebar_has_at_most_40_entries():
    tables = re.findall(
        r"```{toctree}\n:hidden:\n:caption: .*\n\n((?:[^`\s]+\n)+)", page("docs/index.md")
    )
    entries = "".join(tables).split()
    assert len(entries) == len(set(entries)) <= 40
