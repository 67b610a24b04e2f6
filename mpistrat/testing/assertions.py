"""Assertions that hold on all ranks or fail on all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from mpistrat.epochs.report import rank_list
from mpistrat.strategies import Strategy

__all__ = ["assert_all_ranks", "refused"]


def assert_all_ranks(strategy: Strategy, condition: Any, message: str = "") -> None:
    """Fail on every rank if `condition` is false on any.

    **Collective**: every rank makes the call. A plain ``assert`` that fails on one rank alone
    leaves the others to find out at their next collective.

    Parameters
    ----------
    strategy : Strategy
        Whose ranks are asked.
    condition : object
        Its truth counts.
    message : str, optional

    Raises
    ------
    AssertionError
        On every rank, naming those where it is false.
    """
    answers = strategy.extended.collectives.gather_json(bool(condition), "assert_all_ranks")
    wrong = [rank for rank, answer in enumerate(answers) if not answer]
    if wrong:
        text = f"false on {rank_list(wrong)} of {len(answers)}"
        raise AssertionError(f"{message}: {text}" if message else text)


@contextlib.contextmanager
def refused(error: type[Exception], pattern: str = "") -> Iterator[None]:
    """Assert that the ``with`` block raises `error` with a text that matches `pattern`. Local.

    Raises
    ------
    AssertionError
        If it raises nothing, or says something else.
    """
    try:
        yield
    except error as caught:
        assert re.search(pattern, str(caught)), f"{pattern!r} is not in {str(caught)!r}"
    else:
        raise AssertionError(f"nothing was raised where {error.__name__} was expected")
