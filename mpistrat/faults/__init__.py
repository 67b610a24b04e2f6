"""Fault injection: delay or kill a rank at a given collective, or corrupt its data."""

from __future__ import annotations

import builtins
import functools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from mpistrat import errors
from mpistrat.agreement.channel import Channel
from mpistrat.arrays import Array
from mpistrat.comm.wire import is_narrow
from mpistrat.failures.logs import close
from mpistrat.mpi.world import started_world
from mpistrat.settings import not_negative_integer, positive_integer, settings
from mpistrat.system.text import rank_list

_GRAMMAR = (
    "delay:SECONDS, jitter:SECONDS, kill, stop, exhaust, corrupt[:BIT], raise:CLASS, exit[:CODE] "
    "or _exit[:CODE], then @rank=R,collective=K (a delay may leave either out; jitter has no "
    "collective but may have a seed)"
)


@dataclass(frozen=True)
class Fault:
    """Specification of one fault."""

    kind: str
    """A keyword of the grammar."""
    argument: Any
    """Seconds, bit (``None`` for a sign), exit code or exception; ``None`` for other kinds."""
    rank: int | None
    """Rank on which it happens; ``None`` for every rank."""
    collective: int | None
    """Number of the collective, from 1; ``None`` for every collective."""
    seed: int
    """Seed of the random numbers of jitter."""
    text: str
    """The text that it was parsed from, for messages."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


def _bit(text: str) -> int | None:
    return None if text == "sign" else not_negative_integer(text)


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
    except TypeError:  # its constructor does not take a single string
        raise ValueError from None
    return found


@dataclass(frozen=True)
class _Kind:
    read: Callable[[str], Any] | None = None
    """Parses the argument; ``None`` for a kind without one."""
    default: str | None = None
    """The default argument; ``None`` if an argument is required."""
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
    "rank": not_negative_integer,
    "collective": positive_integer,
    "seed": not_negative_integer,
}


def read_fault(text: str) -> Fault:
    """Return the fault that `text` describes, or raise `ValueError`."""
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
    """Return the faults that `text` describes, with ``;`` between them, or raise `ValueError`."""
    return tuple(read_fault(each) for each in text.split(";") if each.strip())


def _refusal(text: str, reason: str) -> ValueError:
    return ValueError(f"The fault {text!r} cannot be read: {reason}. Write {_GRAMMAR}.")


_TOO_MANY_BYTES = 2**62


def _make_act(fault: Fault, channel: Channel) -> Callable[[], object]:
    """Return a function that makes `fault` happen once in this process."""
    argument = fault.argument
    if fault.kind == "jitter":
        # Each rank draws its own delays, and draws the same ones in every run.
        generator = random.Random(f"{fault.seed} on rank {channel.rank}")
        return lambda: time.sleep(generator.uniform(0, argument))
    acts: dict[str, Callable[[], object]] = {
        "delay": lambda: time.sleep(argument),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "exhaust": _exhaust_memory,
        "corrupt": lambda: _corrupt_next(channel, argument),
        "raise": lambda: _raise(argument, fault.text),
        "exit": lambda: sys.exit(argument),
        "_exit": lambda: os._exit(argument),
    }
    return acts[fault.kind]


def _raise(error: BaseException | type[BaseException], text: str) -> None:
    raise error(f"injected by {text!r}") if isinstance(error, type) else error


def _corrupt_next(channel: Channel, bit: int | None) -> None:
    """Flip one bit in the next floating-point numbers that this rank receives."""
    before = channel.on_received

    def corrupt(received: Array) -> None:
        # Corrupt only floats: an integer may be a length or a digest, which would not look like
        # drift.
        is_floating = received.dtype.kind in "fc" or is_narrow(received.dtype)
        if not received.size or not is_floating:
            return
        numbers = received.reshape(-1)
        bits = numbers.view(np.uint8)
        # The default is the sign of the first number, because no cast rounds it away.
        sign = 8 * numbers.real.itemsize - 1
        place, position = divmod(sign if bit is None else bit, 8)
        bits[place % bits.size] ^= 1 << position
        channel.on_received = before

    channel.on_received = corrupt


def _exhaust_memory() -> None:
    """Allocate more memory than any machine can address, as if memory had run out."""
    np.empty(_TOO_MANY_BYTES, np.uint8)


_logger = logging.getLogger("mpistrat")

_DEADLY = ("kill", "stop", "_exit")

_from_environment: list[Injection] = []
"""Injections that the setting has caused in this process."""


class Injection:
    """A fault that waits for its collective on one channel. `inject` returns it.

    As a context manager it takes the fault back at the end of the ``with`` block.

    Parameters
    ----------
    channel : Channel
        The channel whose collectives are counted.
    fault : Fault
        The fault to make happen.
    collectives_before : int
        Number of collectives that were made before the fault begins to count.

    Attributes
    ----------
    is_done : bool
        Whether it has happened on this rank, for a fault that happens only once.

    Raises
    ------
    ValueError
        If there is no such rank, the collective is over, or the setting ``MPISTRAT_CHECKS`` is
        off, so that collectives are not counted.

    Examples
    --------
    >>> injection = ms.testing.inject("delay:0.1", strategy=strategy)
    >>> injection.remove()
    """

    def __init__(self, channel: Channel, fault: Fault, collectives_before: int = 0) -> None:
        if not channel.checks:
            raise ValueError(
                f"The fault {fault.text!r} cannot happen: collectives are not counted where the "
                "setting MPISTRAT_CHECKS is off. Turn it on."
            )
        if fault.rank is not None and fault.rank >= channel.size:
            raise ValueError(
                f"The fault {fault.text!r} is for rank {fault.rank}, but there are only "
                f"{rank_list(range(channel.size))}."
            )
        self.fault = fault
        self.is_done = False
        self._channel = channel
        self._act = _make_act(fault, channel)
        self._collective: int | None = None
        if fault.collective is not None:
            self._collective = collectives_before + fault.collective
            if self._collective <= channel.ledger.sequence:
                raise ValueError(
                    f"The fault {fault.text!r} comes too late: the next collective is number "
                    f"{channel.ledger.sequence + 1}. MPIStrategy() takes the first ones."
                )
        if fault.rank is None or fault.rank == channel.rank:
            _listeners(channel).append(self)

    def _is_on(self, channel: Channel) -> bool:
        """Return whether this fault was injected into `channel`. Local."""
        return self._channel is channel

    def remove(self) -> None:
        """Take the fault back if it has not happened yet. Local."""
        listeners = _listeners(self._channel)
        if self in listeners:
            listeners.remove(self)
        if not listeners:
            self._channel.on_collective = None

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _on_collective(self, number: int) -> None:
        """Make the fault happen if collective `number` is its own."""
        if self._collective is None:
            self._act()
        elif number == self._collective and not self.is_done:
            # Only once: a collective that raised is not counted, so the next one gets its number.
            self.is_done = True
            self.remove()  # a channel without faults skips the callback
            rank, size = self._channel.rank, self._channel.size
            if self.fault.kind in _DEADLY:
                close()  # otherwise log lines that are being sent to rank 0 would be lost
            text = self.fault.text
            _logger.warning("rank %d of %d: %r before collective %d", rank, size, text, number)
            self._act()


class _Listeners(list[Injection]):
    """The `on_collective` callback of a channel with faults."""

    def __call__(self, number: int) -> None:
        # Iterate over a copy, because an injection removes itself from the list when it is done.
        for injection in tuple(self):
            injection._on_collective(number)


def _listeners(channel: Channel) -> _Listeners:
    if not isinstance(channel.on_collective, _Listeners):
        channel.on_collective = _Listeners()
    return channel.on_collective


def inject_from_environment(channel: Channel) -> None:
    """Inject the faults of ``MPISTRAT_FAULT``, once, if `channel` has all ranks of the job."""
    # A fault with a number happens once per process, although a new channel counts from 1 again.
    faults = _faults(settings().fault)
    world = started_world() if faults else None
    # The setting uses the ranks of the job. A smaller channel numbers its ranks differently.
    if world is not None and world.size != channel.size:
        return
    if any(each._is_on(channel) for each in _from_environment):
        return
    done = [each.fault for each in _from_environment if each.is_done]
    for fault in faults:
        if fault not in done:
            _from_environment.append(Injection(channel, fault))


# Cached, so that the same text returns the same objects, and finished faults are recognized.
_faults = functools.lru_cache(read_faults)
