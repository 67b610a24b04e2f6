"""`mpistrat explain` on records made up for it."""

import json

import pytest

from mpistrat.cli import main

MEMBERS = [[0, 3]]


def entry(number, kind="all_reduce", site="train.py:10", state="done", **changes):
    came = state in ("done", "agreed")
    return {
        "number": number,
        "kind": kind,
        "name": None,
        "strategy": 0,
        "details": ["SUM", "float32 (4,)"],
        "runs": number,
        "merge_calls": 0,
        "updates": 0,
        "failures": 0,
        "site": site,
        "function": "step",
        "state": state,
        "began_ns": 1000 * number + 1,
        "agreed_ns": 1000 * number + 2 if came else 0,
        "ended_ns": 1000 * number + 3 if came else 0,
        **changes,
    }


def dump(rank, entries, size=4, reason="signal SIGUSR2", stack=(), members=MEMBERS):
    return {
        "format": "mpistrat-flight",
        "format_version": 1,
        "reason": reason,
        "rank": rank,
        "size": size,
        "wall_clock_ns": 10**9,
        "monotonic_ns": 10**6,
        "stack": list(stack),
        "channels": [
            {
                "members": members,
                "rank": rank,
                "size": size,
                "next_number": len(entries),
                **dict.fromkeys(("runs", "merge_calls", "updates", "failures"), len(entries)),
                "entries": entries,
            }
        ],
    }


@pytest.fixture
def explain(tmp_path, capsys):
    def run(dumps):
        for each in dumps:
            (tmp_path / f"flight.rank{each['rank']}.json").write_text(json.dumps(each))
        code = main(["explain", "--json", str(tmp_path)])
        found = json.loads(capsys.readouterr().out)
        assert main(["explain", str(tmp_path)]) == code
        return code, found, capsys.readouterr().out

    return run


def test_equal_records_agree(explain):
    code, found, text = explain([dump(r, [entry(n) for n in range(5)]) for r in range(4)])
    assert code == 0
    assert found["divergences"] == []
    assert "4 of 4 ranks left a flight record" in text
    assert "agree on every collective" in text


@pytest.mark.parametrize("guilty", range(4))
def test_another_shape_is_found_where_it_came_first(explain, guilty):
    dumps = []
    for rank in range(4):
        entries = [entry(n) for n in range(6)]
        # Where they part nothing can be agreed, and what follows must not matter.
        entries[5] = entry(5, state="failed")
        if rank == guilty:
            entries[5] = entry(5, "reduce", "eval.py:7", "failed", details=["MAX", "float32 (5,)"])
        dumps.append(dump(rank, entries))
    code, found, text = explain(dumps)
    (divergence,) = found["divergences"]
    assert code == 1
    assert divergence["number"] == 5
    assert divergence["suspects"] == [guilty]
    assert [group["ranks"] for group in divergence["groups"]] == [
        [rank for rank in range(4) if rank != guilty],
        [guilty],
    ]
    assert f"Rank {guilty} diverges from the others at collective 5:" in text
    assert "last collective" not in text, "the table of the divergence shows it"
    assert "eval.py:7" in text
    assert "train.py:10" in text


@pytest.mark.parametrize("name", ["runs", "merge_calls", "updates", "failures"])
def test_counters_that_differ_are_shown(explain, name):
    dumps = [
        dump(r, [entry(0), entry(1, state="failed", **{name: 7 if r == 2 else 3})])
        for r in range(4)
    ]
    code, found, text = explain(dumps)
    assert code == 1
    assert found["divergences"][0]["suspects"] == [2]
    row = next(line for line in text.splitlines() if line.strip().startswith("ranks"))
    assert name in row


def test_a_rank_that_does_not_come(explain):
    waiting = [entry(0), entry(1, state="waiting")]
    dumps = [dump(r, waiting) for r in (0, 1, 3)]
    dumps.append(dump(2, [entry(0)], stack=["/home/me/train.py:44 in load"]))
    code, found, text = explain(dumps)
    assert code == 1
    (divergence,) = found["divergences"]
    assert (divergence["number"], divergence["suspects"]) == (1, [2])
    assert "train.py:44" in text
    _, _, others = text.partition("What the other ranks did last:\n")
    (title, row) = others.splitlines()
    assert title.endswith("record written because")
    assert row.split()[:2] == ["2", "0:"]
    assert 'all_reduce("sum"' in row
    assert row.endswith("signal SIGUSR2")


def test_a_rank_without_a_dump_is_named(explain):
    code, found, text = explain(
        [dump(r, [entry(0), entry(1, state="failed")]) for r in range(4) if r != 3]
    )
    assert code == 1
    assert found["missing_dumps"] == [3]
    assert found["divergences"][0]["suspects"] == [3]
    assert "There is no record from rank 3." in text


def test_an_older_dump_is_no_divergence(explain):
    dumps = [dump(r, [entry(n) for n in range(8 if r else 5)]) for r in range(4)]
    code, found, _ = explain(dumps)
    assert (code, found["divergences"]) == (0, [])


def test_records_of_other_length_meet_where_both_reach(explain):
    dumps = [
        dump(r, [entry(n) for n in range(3 * r, 20)] + [entry(20, state="waiting")])
        for r in range(4)
    ]
    assert explain(dumps)[0] == 0


def test_a_refusal_of_all_is_none(explain):
    details = ["refused: TypeError"]
    dumps = [
        dump(r, [entry(0, state="refused", details=[f"refused: {kind}"])])
        for r, kind in enumerate(["TypeError", "TypeError", "ValueError", "TypeError"])
    ]
    assert explain(dumps)[0] == 0
    dumps[1] = dump(1, [entry(0, state="failed")])
    code, found, _ = explain(dumps)
    assert code == 1
    assert found["divergences"][0]["suspects"] == [1]
    assert details[0] in found["divergences"][0]["groups"][0]["what"]


def test_the_first_of_two_communicators_is_named_first(explain):
    def two(rank):
        of_all = dump(rank, [entry(0), entry(9, state="waiting", began_ns=9000)])
        entries = [entry(0, details=[str(rank)], state="failed", began_ns=100)]
        of_pair = dump(rank, entries, members=[[2, 3]])
        if rank >= 2:
            of_all["channels"] += of_pair["channels"]
        if rank == 0:
            del of_all["channels"][0]["entries"][1]
        return of_all

    code, found, text = explain([two(rank) for rank in range(4)])
    assert code == 1
    assert [each["members"] for each in found["divergences"]] == [[[2, 3]], [[0, 3]]]
    assert "Ranks 2 and 3 diverge at collective 0 among ranks 2-3:" in text


def _damaged(**changes):
    return json.dumps(dump(0, [entry(0)], size=2, members=[[0, 1]]) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not JSON"),
        ("[]", "not a flight record"),
        ("[" * 100_000, "not JSON"),
        (_damaged(size=10**12), "damaged: it names rank 0 of 1000000000000"),
        (_damaged(rank=True), "damaged: it names rank True of 2"),
        (_damaged(rank=2), "damaged: it names rank 2 of 2"),
        (
            _damaged(channels=[{"members": [[0, 10**12]], "entries": []}]),
            "channels have ranks beyond the 2 of the job",
        ),
        (_damaged(channels=[{"members": [[0]], "entries": []}]), "damaged"),
        (_damaged(channels=None), "damaged"),
        ('{"format": "mpistrat-flight", "format_version": 2, "rank": 0, "size": 1}', "version 2"),
        ('{"format": "mpistrat-flight", "format_version": 1}', "names rank None of None"),
        ('{"format": "mpistrat-flight", "format_version": 1, "rank": 0, "size": 1}', "damaged"),
    ],
)
def test_unusable_files(tmp_path, capsys, text, message):
    file = tmp_path / "a.json"
    file.write_text(text)
    assert main(["explain", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_unusable_choices_of_files(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "no flight record" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for name, rank, size in (("a", 0, 2), ("b", 1, 3), ("c", 0, 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(dump(rank, [], size, members=[[0, 1]])))
    assert main(["explain", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "older job" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 2
    assert "both from rank 0" in capsys.readouterr().err
