import itertools

from hypothesis import given
from hypothesis import strategies as st

from mpistrat.checkpoint.retention import Entry, Retention


def entry(hour, step=None):
    step = hour if step is None else step
    return Entry(hour * 3600.0, step, f"checkpoint-{step}.h5")


def run(hours, max_to_keep, every_hours, found=(), start=0):
    every_s = None if every_hours is None else every_hours * 3600.0
    retention = Retention(max_to_keep, every_s, found, start * 3600.0)
    removed = [each.step for hour in hours for each in retention.add(entry(hour))]
    return [each.step for each in retention.entries], removed


def test_the_newest_stay():
    assert run(range(1, 8), 3, None) == ([5, 6, 7], [1, 2, 3, 4])


def test_none_keeps_all():
    assert run(range(1, 8), None, None) == (list(range(1, 8)), [])


def test_one_stays_for_each_stretch_of_hours():
    assert run(range(1, 10), 2, 3) == ([3, 6, 8, 9], [1, 2, 4, 5, 7])


def test_a_long_stretch_keeps_no_more_than_the_newest():
    assert run(range(1, 8), 3, 1000) == ([5, 6, 7], [1, 2, 3, 4])


def test_the_count_goes_on_in_the_next_job():
    kept, _ = run(range(1, 10), 2, 3)
    again, removed = run(range(10, 13), 2, 3, found=[entry(hour) for hour in kept], start=9)
    assert again == [3, 6, 9, 11, 12]
    assert removed == [8, 10]


def test_files_too_many_go_with_the_next_save():
    found = [entry(hour) for hour in range(1, 6)]
    assert run([6], 2, None, found=found) == ([5, 6], [1, 2, 3, 4])


def test_a_step_saved_again_counts_once():
    retention = Retention(2, None, [], 0.0)
    for hour, step in [(1, 1), (2, 2), (3, 1)]:
        assert retention.add(entry(hour, step)) == []
    assert [each.step for each in retention.entries] == [2, 1]


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(1, 4), st.integers(1, 20))
def test_whatever_the_gaps_the_rule_holds(gaps, max_to_keep, every_hours):
    hours = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    left, removed = run(hours, max_to_keep, every_hours)
    assert sorted(left + removed) == hours
    assert left[-max_to_keep:] == hours[-max_to_keep:]
    kept = [0, *left[:-max_to_keep]]
    assert all(b - a >= every_hours for a, b in itertools.pairwise(kept))
    for hour in removed:
        assert hour - max(each for each in kept if each < hour) < every_hours
