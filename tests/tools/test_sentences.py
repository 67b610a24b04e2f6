"""Sentences: the linter finds what it shall, and the pages and docstrings have nothing of it."""

import pytest

from tests import ROOT
from tools import sentences

PHRASES = """
[everywhere]
anew => again
of (its|their) own => its own
\\w+! => no exclamation marks
[pages]
a pass => epoch
[dialect]
\\w+ alone(?=[.,;:)]) => only
"""


@pytest.fixture
def phrases(tmp_path):
    path = tmp_path / "phrases.txt"
    path.write_text(PHRASES)
    return sentences.read_phrases(path)


def found(tmp_path, phrases, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [f"{each.line}: {each.words!r}" for each in sentences.places(path, phrases)]


def test_a_phrase_is_found_with_its_line_and_remedy(tmp_path, phrases):
    text = "# Title\n\nIt has a room\nof its\nown.\n\n| a | b |\n|---|---|\n| c | Begin ANEW |\n"
    assert found(tmp_path, phrases, "page.md", text) == [
        "4: 'of its own'",
        "9: 'ANEW'",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "`anew` and `a pass!`",
        "```python\nanew = 1  # a pass\n```",
        "    anew, indented as code",
        "renewed anewly",
        "of its `name` own",
        "![](anew.svg) [text](anew.md)",
    ],
)
def test_code_and_other_words_are_not_searched_in_a_page(tmp_path, phrases, text):
    assert found(tmp_path, phrases, "page.md", f"# Title\n\n{text}\n") == []


def test_admonitions_and_alternative_texts_are_searched(tmp_path, phrases):
    text = ":::{note}\nBegin anew.\n:::\n\n![a pass](x.svg)\n"
    assert len(found(tmp_path, phrases, "page.md", text)) == 2


def test_directives_with_sentences_are_searched(tmp_path, phrases):
    text = "# Title\n\n```{glossary}\nepoch\n  Begins\n  anew.\n```\n\n```{toctree}\nanew\n```\n"
    assert found(tmp_path, phrases, "page.md", text) == ["6: 'anew'"]


def test_docstrings_are_searched_without_their_code(tmp_path, phrases):
    text = '''"""First line. Great!

``anew`` and `anew`::

    anew, as code

>>> print("anew")
anew

A file of its own, in a pass.
"""
NUMBER = "anew"
"""Begin anew."""
'''
    assert found(tmp_path, phrases, "module.py", text) == [
        "1: 'Great!'",
        "10: 'of its own'",
        "13: 'anew'",
    ]


def test_a_section_that_is_unknown_is_refused(tmp_path):
    path = tmp_path / "phrases.txt"
    path.write_text("[page]\nanew => again\n")
    with pytest.raises(ValueError, match="unknown section page. Use everywhere, pages or dialect"):
        sentences.read_phrases(path)


def test_comments_and_messages_are_searched(tmp_path, phrases):
    text = """
# Begin anew.
def refuse(name):
    raise ValueError(f"{name} has a file of its own, and no more.")
    raise ValueError("It begins anew every time.")
    return d["anew"], "a anew"
"""
    assert found(tmp_path, phrases, "module.py", text) == [
        "2: 'anew'",
        "4: 'of its own'",
        "5: 'anew'",
    ]


def test_the_dialect_is_told_apart_and_allowed_lines_are_left_out(tmp_path, phrases):
    path = tmp_path / "page.md"
    path.write_text("Rank 0 writes alone.\nIt begins anew and runs alone.\n")
    places = sentences.places(path, phrases)
    assert [(each.line, each.is_dialect) for each in places] == [(1, True), (2, False), (2, True)]
    assert len(sentences.places(path, phrases, ["Rank 0 writes"])) == 2


def test_the_entry_of_a_page_goes_before_that_of_its_folder():
    assert sentences.budget("docs/guide/data.md") == sentences.BUDGETS["docs/guide/data.md"]
    assert sentences.budget("docs/guide/other.md") == sentences.BUDGETS["docs/guide"]
    assert sentences.budget("docs/faq.md") is None


def test_lengths_are_those_of_the_files(tmp_path):
    (tmp_path / "docs" / "_build").mkdir(parents=True)
    (tmp_path / "README.md").write_text("one two\nthree\n")
    (tmp_path / "CHANGELOG.md").write_text("four\n")
    (tmp_path / "docs" / "architecture.md").write_text("four  five")
    (tmp_path / "docs" / "_build" / "built.md").write_text("not counted")
    assert sentences.lengths(tmp_path) == {
        "README.md: lines": 2,
        "CHANGELOG.md: lines": 1,
        "docs/architecture.md: words": 2,
    }


def test_each_phrase_has_a_remedy_and_a_pattern_of_words():
    for phrase in sentences.read_phrases():
        assert phrase.remedy, phrase.words
        assert not phrase.pattern.search(""), phrase.words


def test_pages_and_docstrings_have_no_banned_phrase_and_are_no_longer_than_allowed():
    assert sentences.all_complaints(ROOT) == []
