"""Log forwarding: lines that reach rank 0, and lines that do not."""

import threading
import time

import pytest

from mpistrat.failures import logs
from mpistrat.failures.logs import Line, LogForwarder

RANK, SIZE = 2, 4
LIMIT_S = 20


class FakeChannel:
    """A channel whose rank 0 keeps the delivered lines."""

    def __init__(self, rank=RANK, answer=True):
        self.rank, self.size = rank, SIZE
        self.peers = self
        self.answer = answer
        self.delivered = []
        self.go_on = threading.Event()
        self.go_on.set()

    def deliver(self, lines):
        self.delivered.append(lines)
        self.go_on.wait(LIMIT_S)
        if self.answer is None:
            raise RuntimeError("no side channel can do this")
        return self.answer

    def texts(self):
        return [text for lines in self.delivered for text in lines]


def test_rank_0_receives_lines_in_order(capsys):
    channel = FakeChannel()
    forwarder = LogForwarder(channel)
    for i in range(100):
        forwarder.put(Line(str(i), channel, RANK))
    forwarder.flush(LIMIT_S, print_all=False)
    assert channel.texts() == [str(i) for i in range(100)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("answer", [False, None])
def test_a_rank_that_cannot_tell_prints_itself_and_does_not_ask_again_soon(answer, capsys):
    channel = FakeChannel(answer=answer)
    forwarder = LogForwarder(channel)
    for text in ("one", "two"):
        forwarder.put(Line(text, channel, RANK))
        forwarder.flush(LIMIT_S, print_all=False)
    assert channel.delivered == [["one"]]
    expected = "".join(f"mpistrat: rank {RANK}: {text}\n" for text in ("one", "two"))
    assert capsys.readouterr().err == expected


def test_without_a_side_channel_each_rank_prints_itself(capsys):
    channel = FakeChannel()
    channel.peers = None
    forwarder = LogForwarder(channel)
    forwarder.put(Line("alone", channel, RANK))
    forwarder.flush(LIMIT_S, print_all=False)
    assert capsys.readouterr().err == f"mpistrat: rank {RANK}: alone\n"


def test_rank_0_prints_for_all(capsys):
    channel = FakeChannel(rank=0)
    forwarder = LogForwarder(channel)
    for rank in range(SIZE):
        forwarder.put(Line("all", channel, rank))
    forwarder.put(Line("one", channel, 3))
    forwarder.flush(LIMIT_S, print_all=True)
    assert capsys.readouterr().err == "mpistrat: ranks 0-3: all\nmpistrat: rank 3: one\n"


def test_a_line_of_one_rank_is_printed_when_its_window_is_over(capsys):
    channel = FakeChannel(rank=0)
    LogForwarder(channel).put(Line("own", channel, 0))
    printed, end = "", time.monotonic() + LIMIT_S
    while not printed and time.monotonic() < end:
        time.sleep(0.02)
        printed = capsys.readouterr().err
    assert printed == "mpistrat: rank 0: own\n"


def test_what_comes_too_fast_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(logs, "_MAX_QUEUED", 10)
    channel = FakeChannel()
    forwarder = LogForwarder(channel)
    channel.go_on.clear()
    forwarder.put(Line("first", channel, RANK))
    end = time.monotonic() + LIMIT_S
    while not channel.delivered and time.monotonic() < end:
        time.sleep(0.001)
    for i in range(100):
        forwarder.put(Line(str(i), channel, RANK))
    channel.go_on.set()
    forwarder.flush(LIMIT_S, print_all=False)
    forwarder.flush(LIMIT_S, print_all=False)
    *kept, report = channel.texts()
    assert kept == ["first", *map(str, range(10))]
    assert report.startswith("90 lines were dropped")


def test_questions_stay_short():
    channel = FakeChannel()
    forwarder = LogForwarder(channel)
    channel.go_on.clear()
    for i in range(50):
        forwarder.put(Line(f"{i} " + "é" * 10**6, channel, RANK))
    channel.go_on.set()
    forwarder.flush(LIMIT_S, print_all=False)
    assert [text.split()[0] for text in channel.texts()] == [str(i) for i in range(50)]
    # A character is at most six in JSON, and a monitor reads one MiB.
    assert all(6 * sum(map(len, lines)) < 2**20 for lines in channel.delivered)


def test_saying_something_does_not_wait():
    channel = FakeChannel()
    channel.go_on.clear()
    forwarder = LogForwarder(channel)
    began = time.monotonic()
    for i in range(2000):
        forwarder.put(Line(str(i), channel, RANK))
    assert time.monotonic() - began < 5
    assert not channel.go_on.is_set()
    channel.go_on.set()
