"""Paths as a tree, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["tree_labels"]

_Tree = dict[str, "_Tree"]


def tree_labels(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a label with guide lines, and the path it stands for, groups included. Local."""
    root: _Tree = {}
    for path in paths:
        node = root
        for part in path.split("/"):
            node = node.setdefault(part, {})
    yield from _labels(root, "", "")


def _labels(node: _Tree, above: str, guide: str) -> Iterator[tuple[str, str]]:
    for number, (part, children) in enumerate(node.items(), 1):
        path = f"{above}/{part}" if above else part
        is_last = number == len(node)
        branch, deeper = ("└── ", "    ") if is_last else ("├── ", "│   ")
        if not above:
            branch = deeper = ""
        yield f"{guide}{branch}{part}", path
        yield from _labels(children, path, guide + deeper)
