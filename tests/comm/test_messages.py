"""Messenger: each payload arrives with its header, in whatever order the lanes are read."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.comm import messages as messages_module
from mpistrat.comm import mpi_transport
from mpistrat.comm.messages import Messenger

LANES = (1, 2, 3)
SIZES = (0, 1, 2047, 2048, 2049, 10**6)
"""Bytes, around the limit up to which payloads travel in the header."""


@pytest.fixture
def messenger():
    made = Messenger(MPI.COMM_WORLD)
    yield made
    made.flush()
    MPI.COMM_WORLD.Barrier()
    made.free()


def received(messenger, source, lane):
    end = time.monotonic() + 20
    while (message := messenger.poll(source, lane)) is None:
        assert time.monotonic() < end, (source, lane)
    return message


def payload(sender, lane, number, size):
    return np.full(size, (sender * 50 + lane * 15 + number) % 251, np.uint8)


def assert_is(message, sender, lane, number, sizes, body):
    assert (message.source, message.lane, message.kind) == (sender, lane, lane)
    assert message.number == number
    assert bytes(message.body) == bytes([number % 251]) * body
    assert len(message.buffers) == len(sizes)
    for size, buffer in zip(sizes, message.buffers, strict=True):
        np.testing.assert_array_equal(buffer, payload(sender, lane, number, size))


def send_all(messenger, receiver, cases):
    """Send each case on each lane, so that the payloads of all lanes are under way together."""
    for number, (sizes, body) in enumerate(cases):
        for lane in LANES:
            arrays = [payload(messenger.rank, lane, number, size) for size in sizes]
            messenger.send(receiver, lane, lane, number, bytes([number % 251]) * body, arrays)


@pytest.mark.parametrize("order", [LANES, LANES[::-1]], ids=["as sent", "reversed"])
@pytest.mark.parametrize("body", [0, 2049])
def test_lanes_are_read_in_any_order(rank, size, messenger, order, body):
    cases = [((first, 3000), body) for first in SIZES] + [((each,), body) for each in SIZES]
    cases.append(((), body))
    send_all(messenger, (rank + 1) % size, cases)
    source = (rank - 1) % size
    for lane in order:
        for number, (sizes, body) in enumerate(cases):
            message = received(messenger, source, lane)
            assert_is(message, source, lane, number, sizes, body)


@pytest.mark.parametrize("asked", ["one lane", "all lanes"])
def test_messages_of_a_lane_keep_their_order(rank, size, messenger, asked):
    """A short message, which is in its header, waits for a long one that was sent before it."""
    cases = [((10**6 if number % 2 else 1,), 0) for number in range(12)]
    send_all(messenger, (rank + 1) % size, cases)
    source = (rank - 1) % size
    seen = {lane: [] for lane in LANES}
    for i in range(len(LANES) * len(cases)):
        lane = LANES[i % len(LANES)] if asked == "one lane" else MPI.ANY_TAG
        message = received(messenger, source, lane)
        seen[message.lane].append(message.number)
    assert seen == {lane: list(range(len(cases))) for lane in LANES}


def test_tags_start_again_after_the_largest(rank, size, messenger, monkeypatch):
    monkeypatch.setattr(messenger, "_num_tags", 5)
    cases = [((4000,), 0)] * 4
    source = (rank - 1) % size
    for _ in range(3):
        send_all(messenger, (rank + 1) % size, cases[:1])
        for lane in LANES[::-1]:
            assert_is(received(messenger, source, lane), source, lane, 0, (4000,), 0)
    assert max(messenger._next_tags) < 5


def test_a_message_in_several_parts(rank, size, messenger, monkeypatch):
    monkeypatch.setattr(mpi_transport, "_PART_BYTES", 1000)
    monkeypatch.setattr(messages_module, "_HURRY_NS", 0)
    cases = [((4500, 2500), 0)] * 3
    send_all(messenger, (rank + 1) % size, cases)
    source = (rank - 1) % size
    for lane in LANES[::-1]:
        for number in range(len(cases)):
            assert_is(received(messenger, source, lane), source, lane, number, (4500, 2500), 0)
