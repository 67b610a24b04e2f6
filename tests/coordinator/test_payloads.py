"""Arguments, results and variables of any size: none is taken for another."""

import time

import numpy as np
import pytest

import mpistrat as ms

SIZES = (0, 1, 2047, 2048, 2049, 10**6)
"""Bytes, around the limit up to which payloads travel with their header."""

PAUSE_S = 0.06
"""Of a long closure: the chief sends a worker no second one then."""


def filled(size, number):
    return np.full(size, number % 251, np.uint8)


def work(table, number, given, size, pause_s):
    """Return what the closure has seen of its argument and the variable, and a long result."""
    time.sleep(pause_s)
    before, values = table.value(), given["array"] if isinstance(given, dict) else given
    after = table.value()
    return {
        "number": number,
        "argument": np.array_equal(values, filled(values.size, number)),
        "variable": bool((before == 7).all() and (after == 7).all()),
        "result": filled(size, number + 1),
    }


def write_and_read(table, number, size):
    table.assign(filled(size, 9), read_value=False)
    return bool((table.value() == 9).all())


def assert_all_hold(coordinator, cases, values):
    for (number, given, size), seen in zip(cases, coordinator.fetch(values), strict=True):
        what = (number, given, size)
        assert (seen["number"], seen["argument"], seen["variable"]) == (number, True, True), what
        assert np.array_equal(seen["result"], filled(size, number + 1)), what


@pytest.mark.parametrize("held", SIZES, ids=lambda size: f"variable of {size}")
def test_sizes_against_each_other(job, held):
    def body(coordinator, table):
        cases = [
            (i * len(SIZES) + k, given, size)
            for i, given in enumerate(SIZES)
            for k, size in enumerate(SIZES)
        ]
        for _ in range(2):
            values = [
                coordinator.schedule(work, (table, number, filled(given, number), size, 0.0))
                for number, given, size in cases
            ]
            assert_all_hold(coordinator, cases, values)
        writes = [coordinator.schedule(write_and_read, (table, 0, held)) for _ in range(8)]
        assert all(coordinator.fetch(writes))

    job(body, lambda: (ms.Variable(np.full(held, 7, np.uint8), name="table"),))


def test_long_closures_among_short_ones(job):
    def body(coordinator, table):
        cases = [(number, SIZES[number % 6], SIZES[-1 - number % 6]) for number in range(24)]
        values = [
            coordinator.schedule(
                work,
                (
                    table,
                    number,
                    {"array": filled(given, number)},
                    size,
                    PAUSE_S * (number % 3 == 0),
                ),
            )
            for number, given, size in cases
        ]
        assert_all_hold(coordinator, cases, values)

    job(body, lambda: (ms.Variable(np.full(3000, 7, np.uint8), name="table"),))


def described(text, by_name):
    return {"length": len(text), "sum": sum(by_name.values()), "again": text, "back": by_name}


def test_dicts_and_texts_without_arrays(job):
    """They travel as pickle only, inside the header or as a payload of their own."""

    def body(coordinator):
        cases = [
            ("x" * length, {str(number): number for number in range(count)})
            for length in SIZES
            for count in (0, 3, 500)
        ]
        values = [coordinator.schedule(described, case) for case in cases]
        for (text, by_name), seen in zip(cases, coordinator.fetch(values), strict=True):
            assert seen == described(text, by_name)

    job(body)
