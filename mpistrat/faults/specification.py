"""What is to go wrong, where and when, as a text: ``delay:2.5@rank=1,collective=7``."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpistrat import errors

__all__ = ["Fault", "read_fault", "read_faults"]

_GRAMMAR = (
    "delay:SECONDS, jitter:SECONDS, kill, stop, exhaust, corrupt[:BIT], raise:CLASS, exit[:CODE] "
    "or _exit[:CODE], then @rank=R,collective=K (a delay may leave either out; jitter has no "
    "collective but may have a seed)"
)


@dataclass(frozen=True)
class Fault:
    """One fault, as it was asked for."""

    kind: str
    """One of the words of the grammar."""
    argument: Any
    """Seconds, bit (``None`` for a sign), exit code or exception; ``None`` for other kinds."""
    rank: int | None
    """The rank that it happens on; ``None`` for every rank."""
    collective: int | None
    """The number of the collective, from 1; ``None`` for each of them."""
    seed: int
    """Of the random numbers of jitter."""
    text: str
    """The words that it was read from, for messages."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _bit(text: str) -> int | None:
    return None if text == "sign" else _count(text)


def _number_from_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _exit_code(text: str) -> int:
    code = int(text)
    if not 0 <= code <= 255:
        raise ValueError
    return code


def _exception(text: str) -> type[BaseException]:
    found = getattr(errors, text, None) or getattr(builtins, text, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ValueError
    try:
        found("text")
    except TypeError:  # a class whose parameters are others than one text
        raise ValueError from None
    return found


@dataclass(frozen=True)
class _Kind:
    read: Callable[[str], Any] | None = None
    """Reads the argument; ``None`` where there is none."""
    default: str | None = None
    """The argument where none is given; ``None`` where one must be."""
    keys: tuple[str, ...] = ("rank", "collective")
    needs_collective: bool = True


_KINDS = {
    "delay": _Kind(_seconds, needs_collective=False),
    "jitter": _Kind(_seconds, keys=("rank", "seed"), needs_collective=False),
    "kill": _Kind(),
    "stop": _Kind(),
    "exhaust": _Kind(),
    "corrupt": _Kind(_bit, "sign"),
    "raise": _Kind(_exception),
    "exit": _Kind(_exit_code, "0"),
    "_exit": _Kind(_exit_code, "0"),
}
_KEYS: dict[str, Callable[[str], int]] = {
    "rank": _count,
    "collective": _number_from_1,
    "seed": _count,
}


def read_fault(text: str) -> Fault:
    """Return the fault that `text` describes. Local.

    Raises
    ------
    ValueError
        For words that are not in the grammar.
    """
    action, _, place = text.strip().partition("@")
    name, colon, argument = action.partition(":")
    if name not in _KINDS:
        raise _refusal(text, f"there is no fault {name!r}")
    kind = _KINDS[name]
    values = _read_place(text, name, kind, place)
    if kind.needs_collective and "collective" not in values:
        raise _refusal(text, f"{name} needs collective=K")
    return Fault(
        kind=name,
        argument=_read_argument(text, name, kind, argument if colon else kind.default),
        rank=values.get("rank"),
        collective=values.get("collective"),
        seed=values.get("seed", 0),
        text=text.strip(),
    )


def _read_argument(text: str, name: str, kind: _Kind, argument: str | None) -> Any:
    if kind.read is None:
        if argument is not None:
            raise _refusal(text, f"{name} takes no argument")
        return None
    if argument is None:
        raise _refusal(text, f"{name} needs an argument")
    try:
        return kind.read(argument)
    except ValueError:
        raise _refusal(text, f"the argument of {name} cannot be {argument!r}") from None


def _read_place(text: str, name: str, kind: _Kind, place: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for pair in place.split(",") if place else ():
        key, _, number = pair.partition("=")
        if key not in kind.keys or key in values:
            raise _refusal(text, f"{name} takes {', '.join(kind.keys)} once each, not {pair!r}")
        try:
            values[key] = _KEYS[key](number)
        except ValueError:
            raise _refusal(text, f"{key} cannot be {number!r}") from None
    return values


def read_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults that `text` describes, one or several with ``;`` between. Local.

    Raises
    ------
    ValueError
        For words that are not in the grammar.
    """
    return tuple(read_fault(each) for each in text.split(";") if each.strip())


def _refusal(text: str, reason: str) -> ValueError:
    return ValueError(f"The fault {text!r} cannot be read: {reason}. Write {_GRAMMAR}.")
