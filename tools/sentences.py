"""Linter of sentences: phrases to avoid in pages and in the package, and the length of pages.

    python -m tools.sentences            # name each complaint, and fail if there is one
    python -m tools.sentences --dialect  # name each place of the dialect, too

`make docs` runs it. The phrases and their remedies are in ``docs/banned-phrases.txt``: most may not
occur at all, the dialect rarely. Lines in which a phrase is right are in
``docs/allowed-phrases.txt``. Pages, docstrings, comments and messages are searched; code, names in
backticks and doctests are not. `LIMITS` has the lengths, and the rates of the dialect.
"""

import ast
import collections
import configparser
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PHRASES = ROOT / "docs" / "banned-phrases.txt"
ALLOWED = ROOT / "docs" / "allowed-phrases.txt"
CODE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for code within a sentence, so that no phrase reaches across it."""

LIMITS = {
    "README.md: lines": 120,
    "CHANGELOG.md: lines": 60,
    "docs/architecture.md: words": 1_100,
    "pages: dialect per 1,000 words": 1,
    "package: dialect per 1,000 words": 1,
}
"""The largest value of each figure. Words are separated by white space, code included."""

BUDGETS = {
    "docs/index.md": 450,
    "docs/tutorial": 550,
    "docs/concepts": 700,
    "docs/coming-from": 750,
    "docs/coming-from/mpi4py.md": 850,
    "docs/reference/tf-distribute-names.md": 1_200,
    "docs/reference/tf-data-names.md": 600,
    "docs/reference/tf-distribute-v1-names.md": 300,
    "docs/guide": 1_100,
    "docs/guide/data.md": 1_600,
    "docs/guide/large-models.md": 1_300,
    "docs/guide/gpus.md": 1_400,
    "docs/guide/pytorch.md": 1_200,
    "docs/howto": 1_300,
    "docs/howto/hangs.md": 2_100,
}
"""Words that a page may have. The entry of a page goes before the entry of its folder."""


@dataclass(frozen=True)
class Phrase:
    """A phrase that a sentence should not have."""

    words: str
    pattern: re.Pattern[str]
    remedy: str
    section: str
    """``everywhere``, ``pages``, or ``dialect``, whose phrases may occur at a limited rate."""


def read_phrases(path: Path = PHRASES) -> list[Phrase]:
    """Return the phrases of a file with the sections ``everywhere``, ``pages`` and ``dialect``."""
    parser = configparser.RawConfigParser(delimiters=("=>",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    unknown = set(parser.sections()) - {"everywhere", "pages", "dialect"}
    if unknown:
        raise ValueError(
            f"{path}: unknown section {min(unknown)}. Use everywhere, pages or dialect."
        )
    found = []
    for section in parser.sections():
        for words, remedy in parser.items(section):
            pattern = r"(?<!\w)(?:" + words.replace(" ", r"\s+") + r")(?!\w)"
            found.append(Phrase(words, re.compile(pattern, re.I), remedy, section))
    return found


@dataclass(frozen=True)
class Text:
    """Sentences of a file, without code."""

    line: int
    """The number of the first line in the file."""
    text: str


_PROSE = ("{glossary}", "{note}", "{tip}", "{warning}", "{important}", "{admonition}")
"""Directives between backticks that hold sentences, not code."""


def sentences_of_page(markdown: str) -> Iterator[Text]:
    """Yield the paragraphs, headings and table cells of a page."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "inline" and token.map:
            yield Text(token.map[0] + 1, "".join(_plain(token.children or [])))
        elif token.type == "fence" and token.map and token.info.startswith(_PROSE):
            for text in sentences_of_page(token.content):
                yield Text(token.map[0] + 1 + text.line, text.text)


def _plain(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type in ("text", "image"):
            yield token.content
        elif token.type in ("softbreak", "hardbreak"):
            yield "\n"
        elif token.type in ("code_inline", "html_inline"):
            yield CODE


# A doctest with its output, a block after "::", and names in backticks.
_CODE_OF_DOCSTRING = re.compile(
    r"^[ ]*>>>.*(?:\n[ ]*\S.*)*"
    r"|(?<=::)\n(?:[ ]*\n)+(?P<indent>[ ]+)\S.*(?:\n(?:(?P=indent).*|[ ]*(?=\n)))*"
    r"|``[^`]+``|`[^`]+`",
    re.MULTILINE,
)


def sentences_of_module(source: str) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a module."""
    tree = ast.parse(source)
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str(text)) as constant):
                parts.add(constant)
                yield Text(node.lineno, _CODE_OF_DOCSTRING.sub(_blank, text))
            case ast.JoinedStr(values):
                parts.update(values)
                yield Text(node.lineno, "".join(_literal(value) for value in values))
            case ast.Constant(str(text)) if node not in parts and text.count(" ") > 2:
                yield Text(node.lineno, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string.lstrip("# "))


def _blank(match: re.Match[str]) -> str:
    return CODE + "\n" * match[0].count("\n")


def _literal(part: ast.expr) -> str:
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
        return part.value
    return CODE


@dataclass(frozen=True, order=True)
class Place:
    """A phrase in a file."""

    line: int
    words: str
    remedy: str
    is_dialect: bool


def texts_of(path: Path) -> Iterable[Text]:
    """Return the sentences of a page or module."""
    of_kind = sentences_of_page if path.suffix == ".md" else sentences_of_module
    return of_kind(path.read_text())


def places(path: Path, phrases: Iterable[Phrase], allowed: Iterable[str] = ()) -> list[Place]:
    """Return where a file has phrases, except in lines with one of the `allowed` fragments."""
    is_page = path.suffix == ".md"
    chosen = [phrase for phrase in phrases if is_page or phrase.section != "pages"]
    found = []
    for text in texts_of(path):
        lines = text.text.split("\n")
        for phrase in chosen:
            for match in phrase.pattern.finditer(text.text):
                first = text.text.count("\n", 0, match.start())
                if not any(fragment in lines[first] for fragment in allowed):
                    words = " ".join(match[0].split())
                    is_dialect = phrase.section == "dialect"
                    found.append(Place(text.line + first, words, phrase.remedy, is_dialect))
    return sorted(found)


def read_allowed(path: Path = ALLOWED) -> dict[str, list[str]]:
    """Return by file the fragments of lines in which phrases are right."""
    allowed: dict[str, list[str]] = collections.defaultdict(list)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, fragment = line.partition(": ")
            allowed[name].append(fragment)
    return allowed


def pages(root: Path = ROOT) -> list[Path]:
    """Return README, CHANGELOG and the pages of the documentation."""
    found = sorted((root / "docs").rglob("*.md"))
    top = [root / "README.md", root / "CHANGELOG.md"]
    return [*top, *(page for page in found if "_build" not in page.parts)]


def budget(name: str) -> int | None:
    """Return how many words a page may have, or None."""
    return BUDGETS.get(name, BUDGETS.get(name.rpartition("/")[0]))


def lengths(root: Path = ROOT) -> dict[str, int]:
    """Return the lengths that `LIMITS` limits."""
    return {
        "README.md: lines": len((root / "README.md").read_text().splitlines()),
        "CHANGELOG.md: lines": len((root / "CHANGELOG.md").read_text().splitlines()),
        "docs/architecture.md: words": len((root / "docs" / "architecture.md").read_text().split()),
    }


def all_complaints(root: Path = ROOT, shows_dialect: bool = False) -> list[str]:
    """Return a line for each phrase, length and rate that is not allowed."""
    phrases, allowed = read_phrases(), read_allowed()
    parts = {"pages": pages(root), "package": sorted((root / "mpistrat").rglob("*.py"))}
    found: list[str] = []
    figures: dict[str, float] = dict(lengths(root))
    for part, files in parts.items():
        dialect: list[str] = []
        for path in files:
            name = path.relative_to(root).as_posix()
            for place in places(path, phrases, allowed.get(name, ())):
                line = f"{name}:{place.line}: {place.words!r}: write {place.remedy}"
                (dialect if place.is_dialect else found).append(line)
        num_words = sum(len(text.text.split()) for path in files for text in texts_of(path))
        figure = f"{part}: dialect per 1,000 words"
        figures[figure] = round(1000 * len(dialect) / num_words, 1)
        if shows_dialect or figures[figure] > LIMITS[figure]:
            found += dialect
    for path in parts["pages"]:
        name = path.relative_to(root).as_posix()
        words, most = len(path.read_text().split()), budget(name)
        if most is not None and words > most:
            found.append(f"{name}: {words:,} words, at most {most:,} are allowed")
    return found + [
        f"{what}: {value:,}, at most {LIMITS[what]:,} are allowed"
        for what, value in figures.items()
        if value > LIMITS[what]
    ]


def main() -> int:
    """Print the complaints, and return 1 if there are any."""
    shows_dialect = "--dialect" in sys.argv[1:]
    found = all_complaints(shows_dialect=shows_dialect)
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found) and not shows_dialect)


if __name__ == "__main__":
    sys.exit(main())
