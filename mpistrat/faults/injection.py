"""Faults that wait on a channel for their collective."""

from __future__ import annotations

import functools
import logging
from types import TracebackType

from mpistrat.epochs.channel import Channel
from mpistrat.epochs.logs import close
from mpistrat.epochs.report import rank_list
from mpistrat.faults.acts import make_act
from mpistrat.faults.specification import Fault, read_faults
from mpistrat.settings import settings
from mpistrat.world import started_world

__all__ = ["Injection", "inject_from_environment"]

_logger = logging.getLogger("mpistrat")

_DEADLY = ("kill", "stop", "_exit")

_from_environment: list[Injection] = []
"""What the setting has injected into the channels of this process so far."""


class Injection:
    """One fault on one channel, waiting for its collective.

    A context manager, which takes the fault back at its end.

    Parameters
    ----------
    channel : Channel
    fault : Fault
    collectives_before : int
        How many collectives there were before the one that the fault counts as its first.

    Attributes
    ----------
    is_done : bool
        Whether a fault that happens once has happened on this rank.

    Raises
    ------
    ValueError
        If there is no such rank, the collective is over, or collectives are not counted because
        the setting ``MPISTRAT_CHECKS`` is off.
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
        self._act = make_act(fault, channel)
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

    def is_on(self, channel: Channel) -> bool:
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

    def on_collective(self, number: int) -> None:
        """Do the fault if collective `number` is the one. Local."""
        if self._collective is None:
            self._act()
        elif number == self._collective and not self.is_done:
            # A collective that raised has not taken place: the next one has its number.
            self.is_done = True
            rank, size = self._channel.rank, self._channel.size
            if self.fault.kind in _DEADLY:
                close()  # of the lines on their way to rank 0, those of the last moment are lost
            text = self.fault.text
            _logger.warning("rank %d of %d: %r before collective %d", rank, size, text, number)
            self._act()


class _Listeners(list[Injection]):
    """What a channel with faults calls."""

    def __call__(self, number: int) -> None:
        for injection in tuple(self):
            injection.on_collective(number)


def _listeners(channel: Channel) -> _Listeners:
    if not isinstance(channel.on_collective, _Listeners):
        channel.on_collective = _Listeners()
    return channel.on_collective


def inject_from_environment(channel: Channel) -> None:
    """Inject what the setting ``MPISTRAT_FAULT`` says, once, if all ranks are on `channel`. Local.

    A fault with a number happens once in a process, also where a fresh channel starts to count
    again.

    Raises
    ------
    ValueError
        If the setting cannot be read, or names a rank that there is not.
    """
    faults = _faults(settings().fault)
    world = started_world() if faults else None
    if world is not None and world.size != channel.size:
        return
    if any(each.is_on(channel) for each in _from_environment):
        return
    done = [each.fault for each in _from_environment if each.is_done]
    for fault in faults:
        if fault not in done:
            _from_environment.append(Injection(channel, fault))


# The faults of one text are the same objects each time, so that those that are done are known.
_faults = functools.lru_cache(read_faults)
