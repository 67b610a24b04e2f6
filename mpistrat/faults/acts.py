"""What each kind of fault does to this process."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from mpistrat.epochs.channel import Channel
from mpistrat.faults.corruption import corrupt_next
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
        "corrupt": lambda: corrupt_next(channel, argument),
        "raise": lambda: _raise(argument, fault.text),
        "exit": lambda: sys.exit(argument),
        "_exit": lambda: os._exit(argument),
    }
    return acts[fault.kind]


def _raise(error: BaseException | type[BaseException], text: str) -> None:
    raise error(f"injected by {text!r}") if isinstance(error, type) else error


def _exhaust_memory() -> None:
    """Ask for more memory than any machine can address, as a program does that has run out."""
    np.empty(_TOO_MANY_BYTES, np.uint8)
