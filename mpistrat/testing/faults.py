"""Fault injection for tests: a rank is late, lost or wrong at a collective."""

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
    """Have something go wrong just before a collective, on one rank or on all.

    Local: nothing happens before that collective, and every rank may make the call. The setting
    ``MPISTRAT_FAULT`` does the same to an unchanged program:
    ``MPISTRAT_FAULT="delay:2.5@rank=1,collective=7"``, several with ``;`` between, where
    collectives are numbered as in messages and `MPIStrategy` itself takes the first four.

    Parameters
    ----------
    fault : str or BaseException
        ``"delay:SECONDS"``, at each collective if none is named; ``"jitter:SECONDS"``, a random
        delay up to that at each collective; ``"kill"`` (SIGKILL); ``"stop"`` (SIGSTOP);
        ``"exhaust"``, an allocation that fails with `MemoryError`; ``"corrupt:BIT"``, which
        flips this bit (by default the sign of the first one) of the next floating-point numbers
        that the rank receives;
        ``"raise:CLASS"``, a builtin exception or one of `mpistrat.errors`; ``"exit:CODE"``
        (`sys.exit`) and ``"_exit:CODE"`` (`os._exit`). An exception is raised as it is.
    rank : int, optional
        By default every rank.
    collective : int, optional
        Which one, counted from this call: 1 is the next.
    seed : int, optional
        Of the random numbers of jitter; each rank draws its own.
    strategy : Strategy, optional
        Whose collectives are counted. By default those of the strategy in whose scope the call
        is made, else of the strategies over all ranks of the job.

    Returns
    -------
    Injection
        Its ``remove()`` takes the fault back, also at the end of a ``with`` block.

    Raises
    ------
    ValueError
        For a fault that cannot be read, a rank that there is not, or where the setting
        ``MPISTRAT_CHECKS`` is off.
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
        # Read under a name that the grammar knows, because the class may be the user's own.
        read = read_fault(f"raise:Exception@{place}")
        text = f"raise:{type(fault).__name__}@{place}"
        return Fault("raise", fault, read.rank, read.collective, read.seed, text)
    if not isinstance(fault, str):
        raise TypeError(f"fault must be a text or an exception, not {fault!r}.")
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
        "inject needs a strategy whose collectives it can count. Make an MPIStrategy first, or "
        "name one with strategy=."
    )
