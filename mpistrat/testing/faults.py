"""Fault injection for tests: delay or kill a rank at a collective, or corrupt its data."""

from __future__ import annotations

from mpistrat import context
from mpistrat.agreement.channel import Channel
from mpistrat.errors import ContextError
from mpistrat.faults import Fault, Injection, read_fault
from mpistrat.mpi.world import attached, communicator
from mpistrat.strategies import Strategy, get_strategy, has_strategy


def inject(
    fault: str | BaseException,
    rank: int | None = None,
    collective: int | None = None,
    *,
    seed: int | None = None,
    strategy: Strategy | None = None,
) -> Injection:
    """Make a fault happen just before a collective, on one rank or on all.

    Local: nothing happens before that collective, and every rank may make the call. To inject
    faults into an unchanged program, set ``MPISTRAT_FAULT``, for example
    ``MPISTRAT_FAULT="delay:2.5@rank=1,collective=7"``, with ``;`` between several faults. There
    collectives have the numbers that messages show; `MPIStrategy` itself takes the first four.

    Parameters
    ----------
    fault : str or BaseException
        The fault, as text or as the exception to raise. ``"delay:SECONDS"`` delays the rank, at
        each collective if `collective` is not set; ``"jitter:SECONDS"`` delays it at each
        collective by a random time up to that; ``"kill"`` sends SIGKILL, and ``"stop"`` SIGSTOP;
        ``"exhaust"`` makes an allocation that fails with `MemoryError`; ``"corrupt:BIT"`` flips
        this bit (by default the sign of the first number) in the next floating-point numbers that
        the rank receives; ``"raise:CLASS"`` raises a builtin exception or one of
        `mpistrat.errors`; ``"exit:CODE"`` calls `sys.exit`, and ``"_exit:CODE"`` `os._exit`.
    rank : int, optional
        The rank on which the fault happens. Default: every rank.
    collective : int, optional
        The number of the collective, counted from this call: 1 is the next one. Only ``"delay"``
        may leave it out, and ``"jitter"`` does not take it.
    seed : int, optional
        Seed of the random delays of ``"jitter"``; not negative. Each rank draws its own delays.
        Default: 0.
    strategy : Strategy, optional
        The strategy whose collectives are counted. Default: the strategy in whose scope the call
        is made; outside of every scope, the strategies over all ranks of the job.

    Returns
    -------
    Injection
        Its ``remove()`` takes the fault back, as does the end of a ``with`` block.

    Raises
    ------
    ValueError
        If the fault cannot be parsed, there is no such rank, or the setting ``MPISTRAT_CHECKS``
        is off.
    ContextError
        If there is no strategy yet.

    Examples
    --------
    >>> with ms.testing.inject(OSError("disk gone"), collective=1, strategy=strategy):
    ...     strategy.reduce("sum", 1.0)
    Traceback (most recent call last):
        ...
    OSError: disk gone
    """
    channel = _channel_of(strategy)
    return Injection(channel, _read(fault, rank, collective, seed), channel.ledger.sequence)


def _read(
    fault: str | BaseException, rank: int | None, collective: int | None, seed: int | None
) -> Fault:
    given = {"rank": rank, "collective": collective, "seed": seed}
    place = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    if isinstance(fault, BaseException):
        # Parse it under a name that the grammar knows, because the class may be the user's own.
        read = read_fault(f"raise:Exception@{place}")
        text = f"raise:{type(fault).__name__}@{place}"
        return Fault("raise", fault, read.rank, read.collective, read.seed, text)
    if not isinstance(fault, str):
        raise TypeError(f"fault must be a string or an exception, not {fault!r}.")
    return read_fault(f"{fault}@{place}" if place else fault)


def _channel_of(strategy: Strategy | None) -> Channel:
    if strategy is None and has_strategy():
        strategy = get_strategy()
    if strategy is not None:
        channel: Channel = context.collectives_of(strategy).channel
        return channel
    over_all: Channel = attached(communicator(None), "channel", _refuse)
    return over_all


def _refuse() -> Channel:
    raise ContextError(
        "inject needs a strategy whose collectives it can count. Create an MPIStrategy first, or "
        "name one with strategy=."
    )
