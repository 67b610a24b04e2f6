"""What tests of several folders use."""

import collections
import contextlib
import functools
import gc
import os
import threading
import tracemalloc

import numpy as np

from mpistrat.testing.launch import rank_and_size
from tests import devices

_WORLD = rank_and_size()


def outside_mpiexec(*files):
    """Return the files, or patterns of files, whose tests are left out under mpiexec."""
    return [] if _WORLD is None else list(files)


class CountingTransport:
    """Counts the calls of each method of a transport or of its node reducer, and does them."""

    piggyback = None

    def __init__(self, transport, counts=None):
        self._transport = transport
        self.counts = collections.Counter() if counts is None else counts

    @functools.cached_property
    def node(self):
        node = self._transport.node
        return node and CountingTransport(node, self.counts)

    def __getattr__(self, name):
        attribute = getattr(self._transport, name)
        if name in ("knows", "attach"):
            return attribute
        if not callable(attribute):
            return attribute

        def counted(*args):
            self.counts[name] += 1
            return attribute(*args)

        return counted


def triangle(size):
    """0 + 1 + ... + (size - 1)."""
    return size * (size - 1) // 2


def filenames(caught):
    """Return the file of each warning, without those of strategies that earlier tests left."""
    return [each.filename for each in caught if each.category is not ResourceWarning]


def as_bytes(array):
    return np.asarray(devices.on_host(array)).tobytes()


def result_of(strategy, fn):
    """Return what `fn` returns on this replica, as it is."""
    results = []
    strategy.run(lambda: results.append(fn()))
    return results[0]


@contextlib.contextmanager
def as_nobody():
    """Be a user whom permissions bind: root may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


class Holder:
    """An object with a state of the user's own."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def collect_in_a_thread(make):
    """Collect what `make` returns as garbage, in a cycle and on another thread, or fail."""
    cycle = [make()]
    cycle.append(cycle)
    gc.disable()  # or it might run here already
    try:
        del cycle
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(20)
        assert not collector.is_alive()
    finally:
        gc.enable()


def fresh_bytes(step, num_steps=1):
    """Return the most memory that `num_steps` more steps have needed at a time, in bytes."""
    gc.disable()  # what finalizers of other tests' garbage allocate does not count
    tracemalloc.start()
    try:
        for _ in range(num_steps):
            step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
