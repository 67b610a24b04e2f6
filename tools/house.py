"""House rules: sizes, circles and walks of the package, against limits that only get tighter.

    python -m tools.house              # print the table, and fail where a limit is exceeded
    python -m tools.house --no-walks   # without the traces, which start two ranks

`make house` runs it. What is measured: files and lines of ``mpistrat/``; circles among files and
among folders, with imports for types counted; names in ``__all__``; comments; attributes with an
underscore that another module takes; names that files of several folders share; and how many files
a value passes on its way (`tools/walks.py`). Lines of code are those that hold more than a comment
or a docstring.
"""

import argparse
import ast
import collections
import functools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mpistrat"

Graph = Mapping[str, set[str]]
"""Names, and what each of them imports."""

Limit = int | tuple[int, int]

LIMITS: dict[str, Limit] = {
    "files": 357,
    "lines": 86_200,
    "longest file, code": 400,
    "median file": (150, 240),
    "loose modules": 21,
    "exported names": 171,
    "comments, per mille": (30, 1000),
    "private attributes of others": 156,
    "names in several folders": 8,
    "circles of files": 0,
    "circles of folders": 0,
    "step: files": 12,
    "step: changes of file": 32,
    "restore: files": 30,
    "restore: agreement rounds": 6,
    "write: files": 28,
    "write: agreement rounds": 3,
    "batch: files": 12,
    "step of 4 replicas: files": 22,
}
"""The largest value of each figure; for a pair, the smallest too."""


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """Return the dotted name of a file within the package, that of the folder for __init__."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the path of each module by its dotted name."""
    return {module_name(path, package): path for path in sorted(package.rglob("*.py"))}


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text())


def imports_of(path: Path, known: Mapping[str, Path]) -> list[tuple[str, int]]:
    """Return (module, line) for each import from the package, in functions and for types too."""
    found = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                target = deeper if deeper in known else node.module
                if target in known:
                    found.append((target, node.lineno))
        elif isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names if alias.name in known]
    return found


def import_graph(paths: Mapping[str, Path]) -> Graph:
    """Return the modules that each module imports."""
    return {
        name: {target for target, _ in imports_of(path, paths)} - {name}
        for name, path in paths.items()
    }


def top_level(name: str) -> str:
    """Return the folder of a module, or the module itself where it lies in no folder."""
    return ".".join(name.split(".")[:2])


def folder_graph(graph: Graph) -> Graph:
    """Return the modules that each module imports from, the package's __init__ aside."""
    modules: dict[str, set[str]] = {top_level(name): set() for name in graph if name != "mpistrat"}
    for name, targets in graph.items():
        if name != "mpistrat":
            modules[top_level(name)] |= {top_level(each) for each in targets if each != "mpistrat"}
    return {name: targets - {name} for name, targets in modules.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that import each other in a circle (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def layers(page: Path = ROOT / "docs" / "architecture.md") -> list[list[str]]:
    """Return the modules of each layer, lowest first, from the table of the architecture page."""
    rows = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdigit():
            rows.append((int(cells[0]), re.findall(r"`(\w+)`", cells[1])))
    return [modules for _, modules in sorted(rows)]


def exported_names(paths: Mapping[str, Path]) -> int:
    """Return how many names stand in the `__all__` of all modules."""
    count = 0
    for path in paths.values():
        for node in syntax_tree(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                count += len(ast.literal_eval(node.value))
    return count


def code_lines(path: Path) -> set[int]:
    """Return the numbers of the lines that hold more than a comment or a docstring."""
    left_out = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    found = {
        number
        for token in tokens
        if token.type not in left_out
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def private_attributes_of_others(path: Path) -> int:
    """Return how often a file takes ``x._name``, which it defines nowhere itself."""
    nodes = list(ast.walk(syntax_tree(path)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    return sum(
        node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and ast.unparse(node.value) not in ("self", "cls", "os", "sys")
        for node in attributes
    )


def names_in_several_folders(paths: Iterable[Path]) -> int:
    """Return how many names of files occur in more than one folder."""
    names = collections.Counter(path.name for path in paths if path.name != "__init__.py")
    return sum(count > 1 for count in names.values())


def static_figures() -> tuple[dict[str, int], list[list[str]]]:
    """Return the figures that need no program run, and the circles to show."""
    paths = modules()
    texts = [path.read_text().splitlines() for path in paths.values()]
    lines = list(map(len, texts))
    comments = sum(line.lstrip().startswith("#") for text in texts for line in text)
    graph = import_graph(paths)
    of_files, of_folders = circles(graph), circles(folder_graph(graph))
    # An __init__ that only names its folder's work is no file to read.
    read = [number for number in lines if number > 10]
    figures = {
        "files": len(paths),
        "lines": sum(lines),
        "longest file, code": max(len(code_lines(path)) for path in paths.values()),
        "median file": round(statistics.median(read)),
        "loose modules": len(list(PACKAGE.glob("*.py"))),
        "exported names": exported_names(paths),
        "comments, per mille": round(1000 * comments / sum(lines)),
        "private attributes of others": sum(map(private_attributes_of_others, paths.values())),
        "names in several folders": names_in_several_folders(paths.values()),
        "circles of files": len(of_files),
        "circles of folders": len(of_folders),
    }
    return figures, of_files + of_folders


def walk_figures() -> dict[str, int]:
    """Return the figures of the walks, traced on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        walks = [str(ROOT / "tools" / "walks.py"), folder]
        launch = [sys.executable, "-m", "mpistrat.testing", "-n", "2", "--limit", "110", "--"]
        done = subprocess.run(
            [*launch, *walks], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
    if done.returncode != 0:
        sys.exit(f"tools/walks.py failed:\n{done.stdout}{done.stderr}")
    figures = {}
    for name, walk in json.loads(done.stdout).items():
        figures[f"{name}: files"] = walk["files"]
        figures[f"{name}: changes of file"] = walk["changes"]
        figures[f"{name}: agreement rounds"] = walk["rounds"]
    return figures


def is_within(value: int, limit: Limit | None) -> bool:
    """Return whether a figure keeps its limit. What has none always does."""
    if limit is None:
        return True
    low, high = limit if isinstance(limit, tuple) else (0, limit)
    return low <= value <= high


def main() -> int:
    """Print the table; return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Measure the package against its limits.")
    parser.add_argument("--no-walks", action="store_true", help="leave out the traces")
    arguments = parser.parse_args()
    figures, found = static_figures()
    if not arguments.no_walks:
        figures |= walk_figures()
    is_failed = False
    for name, value in figures.items():
        limit = LIMITS.get(name)
        shown = "" if limit is None else f"limit {limit}"
        is_kept = is_within(value, limit)
        is_failed = is_failed or not is_kept
        print(f"{name:32} {value:>8}  {shown}{'' if is_kept else '  EXCEEDED'}".rstrip())
    for circle in found:
        print("circle:", " <-> ".join(circle))
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
