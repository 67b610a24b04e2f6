"""Flight recorder: its content while the program runs."""

import json
import os

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.agreement.ledger import Ledger
from mpistrat.failures import flight_dumps
from mpistrat.tracing.flight_recorder import FlightRecord


@pytest.fixture(autouse=True)
def only_channel(strategy, monkeypatch):
    """Leave the channels of earlier tests, of which there are hundreds, out of the records."""
    channel = strategy.extended._collectives.channel
    members = {channel: flight_dumps._dumps.members.get(channel, range(strategy.size))}
    monkeypatch.setattr(flight_dumps._dumps, "members", members)


@pytest.fixture
def record(strategy, tmp_path):
    """Return the record of the strategy's channel, and its entries from a number on."""

    def read(since=0):
        path = strategy.extended.dump_flight_record(tmp_path)
        with open(path) as file:
            dump = json.load(file)
        [channel] = dump["channels"]
        entries = [each for each in channel["entries"] if each["number"] >= since]
        return dump, channel, entries

    return read


def next_number(strategy):
    return strategy.extended._collectives.channel.ledger.sequence


def test_entries_say_what_was_agreed_and_where(strategy, record, rank, size):
    since = next_number(strategy)
    strategy.reduce("sum", np.ones((2, 3), np.float32))
    with strategy.scope():
        variable = ms.Variable(np.zeros(4), name=f"w{since}")
    strategy.run(lambda: ms.get_replica_context().all_reduce("max", 1.5))
    dump, channel, entries = record(since)
    assert (dump["rank"], dump["size"], dump["pid"]) == (rank, size, os.getpid())
    assert channel["members"] == [[0, size - 1]]
    assert channel["next_number"] == next_number(strategy) == since + len(entries)
    assert [each["number"] for each in entries] == list(range(since, since + len(entries)))
    first, last = entries[0], entries[-1]
    assert (first["kind"], first["details"][:2]) == ("reduce", ["SUM", "float32 (2, 3)"])
    assert (last["kind"], last["details"][0]) == ("all_reduce", "MAX")
    assert last["runs"] == first["runs"] + 1
    assert any(each["name"] == variable.name for each in entries)
    for each in entries:
        assert each["state"] == "done"
        assert each["site"].startswith("test_flight_recorder.py:")
        assert 0 < each["began_ns"] <= each["agreed_ns"] <= each["ended_ns"]
    assert entries[0]["ended_ns"] <= entries[-1]["began_ns"]


def test_what_all_ranks_refuse_is_refused(strategy, record):
    since = next_number(strategy)
    with pytest.raises(ValueError):
        strategy.reduce("sum", np.ones(2), axis=7)
    _, channel, entries = record(since)
    assert [each["state"] for each in entries] == ["refused"]
    assert entries[0]["details"] == ["refused: ValueError"]
    assert channel["closed"] is None


def test_ranks_that_differ_fail(strategy, record, rank, size, others):
    since = next_number(strategy)
    with pytest.raises(ms.errors.CollectiveMismatchError):
        strategy.reduce("sum", np.ones(2 if others else 3))
    _, channel, entries = record(since)
    (entry,) = entries
    assert entry["state"] == "failed"
    assert entry["agreed_ns"] == 0
    assert f"float64 ({2 if others else 3},)" in entry["details"]
    assert "different collective calls" in channel["closed"]


def test_learning_rates_are_in_the_record(strategy, record):
    since = next_number(strategy)
    with strategy.scope():
        variable = ms.Variable(np.zeros(2), name=f"v{since}")
        optimizer = ms.optimizers.SGD(learning_rate=0.125)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), variable)]))
    _, _, entries = record(since)
    details = [each["details"] for each in entries if each["kind"] == "SGD.apply_gradients"]
    assert any("with the learning rate 0.125" in each for each in details)


def test_where_records_go(strategy, rank, tmp_path):
    extended = strategy.extended
    assert extended.dump_flight_record(tmp_path / "a" / "b") == str(
        tmp_path / "a" / "b" / f"flight.rank{rank}.json"
    )
    named = tmp_path / "mine.{rank}.txt"
    assert extended.dump_flight_record(str(named)) == str(tmp_path / f"mine.{rank}.txt")
    assert sorted(os.listdir(tmp_path)) == ["a", f"mine.{rank}.txt"]
    with pytest.raises(ValueError, match=r"\{rank\}"):
        extended.dump_flight_record(tmp_path / "one.json")
    with pytest.raises(TypeError, match="path"):
        extended.dump_flight_record(7)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        extended.dump_flight_record(tmp_path / "file" / "{rank}")


def test_the_stack_is_that_of_the_program(strategy, tmp_path):
    # The user's file may be called as any of ours.
    code = compile("def fly(dump):\n    return dump()\n", "/home/me/flight_model.py", "exec")
    names = {}
    exec(code, names)
    path = names["fly"](lambda: strategy.extended.dump_flight_record(tmp_path))
    with open(path) as file:
        *_, users, _, ours = json.load(file)["stack"]
    assert users == "/home/me/flight_model.py:2 in fly"
    assert ours.endswith("in dump_flight_record")


def test_a_world_of_one_has_a_record(tmp_path):
    strategy = ms.OneDeviceStrategy()
    strategy.reduce("sum", 3.0)
    with open(strategy.extended.dump_flight_record(tmp_path)) as file:
        dump = json.load(file)
    assert (dump["rank"], dump["size"]) == (0, 1)
    assert dump["mpi_library"] is None or "MPI" in dump["mpi_library"]
    assert [each["kind"] for each in dump["channels"][0]["entries"]] == ["reduce"]


def test_old_entries_go():
    record, ledger = FlightRecord(4), Ledger()
    for _ in range(10):
        record.begin(ledger, ("reduce", None, 0), "", None)
        ledger.sequence += 1
    assert [each.number for each in record.entries] == [6, 7, 8, 9]
    record.resize(2)
    assert [each.number for each in record.entries] == [8, 9]
