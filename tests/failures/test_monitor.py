"""Monitor: answers to ranks of the job, and none to others, who block no rank."""

import functools
import json
import os
import resource
import socket
import time

import pytest

from mpistrat.agreement.channel import Channel
from mpistrat.comm.transport import SoloTransport
from mpistrat.failures import logs
from mpistrat.failures.monitor import Address, Monitor, read_line
from mpistrat.failures.peers import MonitorClient, RankState

KEY = "0123"
LIMIT_S = 20


@pytest.fixture(scope="module")
def monitor():
    monitor, channel = Monitor(), Channel(SoloTransport(), None)
    handlers = MonitorClient(channel, KEY, [monitor.address]).handlers()
    monitor.add(KEY, handlers | {"log": functools.partial(logs.take_lines, channel)})
    return monitor


def send(monitor, message):
    """Return a connection over which `message` was sent."""
    connection = monitor.address.connect(LIMIT_S)
    try:
        connection.sendall(message)
    except ConnectionError:
        connection.close()
        raise
    return connection


def ask(monitor, **question):
    with send(monitor, json.dumps(question).encode() + b"\n") as connection:
        return json.loads(read_line(connection) or "null")


def test_the_state_of_the_rank(monitor):
    found = ask(monitor, key=KEY, ask="state")
    assert (found["state"], found["sequence"]) == (RankState.LATE, 0)
    assert "test_monitor.py" in found["site"]


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"[" * 100_000 + b"\n",
        b"17\n",
        b"[]\n",
        b"\xff\xfe\n",
        b"{}\n",
        b'{"key": null, "ask": "state"}\n',
        '{"key": "\u00e9", "ask": "state"}\n'.encode(),
        b'{"key": "0124", "ask": "state"}\n',
        b'{"key": "0123"}\n',
        b'{"key": "0123", "ask": "log", "sender": [], "lines": 3}\n',
        b"x" * 2**21,
    ],
)
def test_what_strangers_say_is_not_answered_and_does_no_harm(monitor, message):
    try:
        with send(monitor, message) as connection:
            assert read_line(connection) == b""
    except ConnectionError:
        pass  # it was closed before all was sent
    assert ask(monitor, key=KEY, ask="state")["state"] == RankState.LATE


def test_silent_strangers_keep_nobody_waiting_and_are_closed(monitor):
    strangers = [send(monitor, message) for message in [b"", b"half a "] * 20]
    began = time.monotonic()
    assert ask(monitor, key=KEY, ask="state")["state"] == RankState.LATE
    assert time.monotonic() - began < 0.9
    for each in strangers:
        each.settimeout(LIMIT_S)
        assert each.recv(1) == b""
        each.close()


def test_a_question_may_come_in_parts(monitor):
    message = json.dumps({"key": KEY, "ask": "state"}).encode() + b"\n"
    with send(monitor, message[:9]) as connection:
        time.sleep(0.1)
        connection.sendall(message[9:])
        assert json.loads(read_line(connection))["state"] == RankState.LATE


def test_who_asks_without_an_end_of_line(monitor):
    with send(monitor, json.dumps({"key": KEY, "ask": "state"}).encode()) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert json.loads(read_line(connection))["state"] == RankState.LATE


@pytest.mark.parametrize("answers", [True, False])
def test_lines_are_delivered_or_not(monitor, answers):
    asked = []

    def take(question):
        asked.append((question["sender"], question["lines"], question.is_awaited()))
        return {"taken": answers}

    monitor.add("0567", {"log": take})
    peers = MonitorClient(Channel(SoloTransport(), None), "0567", [monitor.address])
    assert peers.deliver(["one", "two"]) is answers
    assert asked == [(0, ["one", "two"], True)]


def test_lines_are_not_delivered_to_nobody(monitor):
    channel = Channel(SoloTransport(), None)
    assert not MonitorClient(channel, "a wrong key", [monitor.address]).deliver(["one"])
    with socket.create_server(("", 0)) as closed:
        nobody = Address(monitor.address.host, closed.getsockname()[1], monitor.address.pid)
    assert not MonitorClient(channel, KEY, [nobody]).deliver(["one"])
    # Without a queue there is nothing that takes lines.
    assert not MonitorClient(channel, KEY, [monitor.address]).deliver(["one"])


def num_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("files", "most"), [(4096, 64), (320, 20)])
def test_strangers_hold_few_files(monitor, files, most):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
    strangers = []
    try:
        before = num_files()
        for _ in range(100):
            strangers.append(send(monitor, b"half a question"))
            time.sleep(0.001)
        assert num_files() - before - len(strangers) <= most + 1
        assert ask(monitor, key=KEY, ask="state")["state"] == RankState.LATE
    finally:
        for each in strangers:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("start", [b"x", b'{"key": "0124", "ask": "log", "lines": ["'])
def test_of_a_stranger_4_kib_are_read(monitor, start):
    connection = send(monitor, start)
    connection.settimeout(0.5)
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        for _ in range(100):
            connection.sendall(b"x" * 1024)
            time.sleep(0.001)
    assert time.monotonic() - began < 0.4  # before the question is overdue
    connection.close()


def test_of_a_rank_a_long_question_is_read(monitor):
    asked = []
    monitor.add("0890", {"log": lambda question: asked.append(question["lines"]) or {}})
    assert ask(monitor, key="0890", ask="log", lines=["x" * 2**18]) == {}
    assert asked == [["x" * 2**18]]


def test_it_listens_where_it_is_told():
    monitor = Monitor("127.0.0.1")
    assert monitor._server.getsockname()[0] == "127.0.0.1"
    monitor.add(KEY, {"state": lambda question: {"state": "late"}})
    assert ask(monitor, key=KEY, ask="state") == {"state": "late"}
