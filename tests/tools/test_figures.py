"""Figures in the pages are those of the recorded run, and no page has others without a source."""

import json
import re

import pytest

from tests import ROOT
from tools import figures
from tools.pictures import reading

REPORTS = json.loads(figures.RECORD.read_text())
PAGES = [
    ROOT / "README.md",
    *(each for each in (ROOT / "docs").glob("*.md") if each.stem != "checkpoint-format"),
    *(ROOT / "docs").glob("[cght]*/*.md"),
]
MEASURED = re.compile(
    r"\d ?(µs|us|ms|[MG]B/s)\b|\d times\W+(as (long|fast)|the rate|faster|slower)"
    r"|\bby \d+ ?%|\d % (of the rate|longer|faster|slower)|\btwice (as fast|the rate|as long)"
)


def test_the_pages_have_the_figures_of_the_recorded_run():
    assert list(figures.complaints(REPORTS)) == []


def test_the_picture_of_reading_is_of_the_same_run():
    path = ROOT / "tools" / "pictures" / "data" / "reading.json"
    assert json.loads(path.read_text()) == reading.record()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_has_its_source(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    name = str(page.relative_to(ROOT))
    known = [each.pattern() for each in figures.SENTENCES if each.page == name]
    for paragraph in re.split(r"\n\n|\n(?=[-|*] )", text):
        if MEASURED.search(paragraph) and "benchmarks/" not in paragraph:
            assert any(re.search(each, paragraph) for each in known), (
                f"{paragraph!r} has a measured figure. Link the page of the benchmark, or add the "
                "sentence to tools/figures.py."
            )


def changed(tmp_path, page, old, new):
    for each in {page.page for page in (*figures.SENTENCES, *figures.TABLES)}:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / each).read_text()
        assert each != page or old in text
        (tmp_path / each).write_text(text.replace(old, new) if each == page else text)
    return list(figures.complaints(REPORTS, tmp_path))


def test_another_figure_in_a_sentence_is_named(tmp_path):
    value = figures.figures(REPORTS)["us per call"]
    found = changed(tmp_path, "docs/coming-from/mpi4py.md", f"about {value} µs", "about 9.9 µs")
    assert [each.partition(":")[0] for each in found] == ["docs/coming-from/mpi4py.md"]


def test_a_sentence_that_is_gone_is_named(tmp_path):
    found = changed(tmp_path, "docs/concepts/collectives.md", "it takes about", "it takes")
    assert len(found) == 1
    assert "no sentence reads" in found[0]


def test_another_figure_in_a_table_is_named(tmp_path):
    found = changed(tmp_path, "docs/benchmarks/data.md", "mpistrat, in order, gzip | ", "| 9")
    assert [each.partition(":")[0] for each in found] == ["docs/benchmarks/data.md"]


def test_written_pages_have_no_complaints():
    for page in {each.page for each in (*figures.SENTENCES, *figures.TABLES)}:
        text = (ROOT / page).read_text()
        assert figures.written(page, text, REPORTS) == text
