"""Linter of sentences: banned phrases in pages and docstrings, and the length of pages.

    python -m tools.sentences            # name each complaint, and fail where there is one

`make docs` runs it. The phrases and their remedies are in ``docs/banned-phrases.txt``. Code, names
in backticks and doctests are not searched. What may be long, and how long, is in `LIMITS`.
"""

import ast
import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PHRASES = ROOT / "docs" / "banned-phrases.txt"
CODE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for code within a sentence, so that no phrase reaches across it."""

LIMITS = {
    "README.md: lines": 120,
    "docs/architecture.md: words": 1_250,
}
"""The largest value of each length. Words are what white space separates, code included."""


@dataclass(frozen=True)
class Phrase:
    """A phrase that no sentence may have."""

    words: str
    pattern: re.Pattern[str]
    remedy: str
    pages_only: bool


def read_phrases(path: Path = PHRASES) -> list[Phrase]:
    """Return the phrases of a file. Its sections are ``everywhere`` and ``pages``."""
    parser = configparser.RawConfigParser(delimiters=("=>",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    unknown = set(parser.sections()) - {"everywhere", "pages"}
    if unknown:
        raise ValueError(f"{path}: unknown section {min(unknown)}. Use everywhere or pages.")
    found = []
    for section in parser.sections():
        for words, remedy in parser.items(section):
            pattern = r"(?<!\w)(?:" + words.replace(" ", r"\s+") + r")(?!\w)"
            found.append(Phrase(words, re.compile(pattern, re.I), remedy, section == "pages"))
    return found


@dataclass(frozen=True)
class Text:
    """Sentences of a file, without code."""

    line: int
    """The number of the first line in the file."""
    text: str


def sentences_of_page(markdown: str) -> Iterator[Text]:
    """Yield the paragraphs, headings and table cells of a page."""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "inline" and token.map:
            yield Text(token.map[0] + 1, "".join(_plain(token.children or [])))


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
    """Yield the docstrings of a module, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            yield Text(
                node.lineno,
                _CODE_OF_DOCSTRING.sub(
                    lambda match: CODE + "\n" * match[0].count("\n"), node.value.value
                ),
            )


def complaints(path: Path, phrases: Iterable[Phrase]) -> list[str]:
    """Return a line for each banned phrase in a page or module."""
    is_page = path.suffix == ".md"
    texts = (sentences_of_page if is_page else sentences_of_module)(path.read_text())
    chosen = [phrase for phrase in phrases if is_page or not phrase.pages_only]
    found = []
    for text in texts:
        for phrase in chosen:
            for match in phrase.pattern.finditer(text.text):
                line = text.line + text.text.count("\n", 0, match.start())
                words = " ".join(match[0].split())
                found.append((line, f"{path}:{line}: {words!r}: write {phrase.remedy}"))
    return [line for _, line in sorted(found)]


def pages(root: Path = ROOT) -> list[Path]:
    """Return README and the pages of the documentation."""
    found = sorted((root / "docs").rglob("*.md"))
    return [root / "README.md", *(page for page in found if "_build" not in page.parts)]


def lengths(root: Path = ROOT) -> dict[str, int]:
    """Return what `LIMITS` limits."""
    return {
        "README.md: lines": len((root / "README.md").read_text().splitlines()),
        "docs/architecture.md: words": len((root / "docs" / "architecture.md").read_text().split()),
    }


def all_complaints(root: Path = ROOT) -> list[str]:
    """Return a line for each phrase and each length that is not allowed."""
    phrases = read_phrases()
    files = [*pages(root), *sorted((root / "mpistrat").rglob("*.py"))]
    found = [line.removeprefix(f"{root}/") for path in files for line in complaints(path, phrases)]
    return found + [
        f"{what}: {value:,}, at most {LIMITS[what]:,} are allowed"
        for what, value in lengths(root).items()
        if value > LIMITS[what]
    ]


def main() -> int:
    """Print the complaints, and return 1 where there is one."""
    found = all_complaints()
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
