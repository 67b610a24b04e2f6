"""What each kind of fault does to this process."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.dtypes import is_narrow
from mpistrat.epochs.channel import Channel
from mpistrat.faults.specification import Fault

__all__ = ["make_act"]

_TOO_MANY_BYTES = 2**62


def make_act(fault: Fault, channel: Channel) -> Callable[[], object]:
    """Return the function that does `fault` to this process, once a call. Local."""
    argument = fault.argument
    if fault.kind == "jitter":
        # Each rank draws its own delays, the same ones in every run.
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
        # Lengths and digests travel as integers: a wrong one there is another fault than drift.
        is_floating = received.dtype.kind in "fc" or is_narrow(received.dtype)
        if not received.size or not is_floating:
            return
        numbers = received.reshape(-1)
        bits = numbers.view(np.uint8)
        # By default the sign of the first number, which no cast rounds away.
        sign = 8 * numbers.real.itemsize - 1
        place, position = divmod(sign if bit is None else bit, 8)
        bits[place % bits.size] ^= 1 << position
        channel.on_received = before

    channel.on_received = corrupt


def _exhaust_memory() -> None:
    """Ask for more memory than any machine can address, as a program does that has run out."""
    np.empty(_TOO_MANY_BYTES, np.uint8)
