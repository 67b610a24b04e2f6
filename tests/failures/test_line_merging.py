"""Equal lines of several ranks: grouped, in order, and within their window."""

import pytest

from mpistrat.failures.logs import WINDOW_S, Line, LineMerger, print_line


class Group:
    """Stands for a channel, of which only the size matters here."""

    def __init__(self, size):
        self.size = size


@pytest.fixture
def clock():
    return Clock()


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def printed():
    return []


@pytest.fixture
def printer(printed, clock):
    return LineMerger(lambda text, ranks: printed.append((text, sorted(ranks))), clock)


@pytest.mark.parametrize("size", [1, 2, 4, 1000])
def test_what_all_ranks_say_is_printed_at_once(printer, printed, size):
    group = Group(size)
    for rank in range(size):
        assert not printed
        printer.add(Line("same", group, rank))
        printer.print_due()
    assert printed == [("same", list(range(size)))]
    assert printer.due_in_s() is None


def test_what_some_ranks_say_waits_for_the_window(printer, printed, clock):
    group = Group(4)
    printer.add(Line("odd", group, 1))
    clock.now_s += WINDOW_S / 2
    printer.add(Line("odd", group, 3))
    printer.print_due()
    assert not printed
    assert printer.due_in_s() == pytest.approx(WINDOW_S / 2)
    clock.now_s += WINDOW_S / 2
    printer.print_due()
    assert printed == [("odd", [1, 3])]


def test_lines_stay_in_order_also_behind_one_that_waits(printer, printed, clock):
    group = Group(2)
    printer.add(Line("first", group, 0))
    for rank in range(2):
        printer.add(Line("second", group, rank))
    printer.print_due()
    assert not printed
    clock.now_s += WINDOW_S
    printer.print_due()
    assert printed == [("first", [0]), ("second", [0, 1])]


def test_what_a_rank_repeats_is_printed_as_often(printer, printed):
    group = Group(2)
    for rank, times in ((0, 3), (1, 2)):
        for _ in range(times):
            printer.add(Line("again", group, rank))
    printer.print_all()
    assert printed == [("again", [0, 1]), ("again", [0, 1]), ("again", [0])]


def test_ranks_of_different_groups_are_kept_apart(printer, printed):
    for rank, group in enumerate((Group(2), Group(2))):
        printer.add(Line("same", group, rank))
    printer.print_all()
    assert printed == [("same", [0]), ("same", [1])]


def test_the_lines_that_wait_are_bounded(printer, printed):
    group = Group(2)
    for i in range(10_000):
        printer.add(Line(str(i), group, 0))
    assert 9000 < len(printed) < 10_000
    printer.print_all()
    assert printed == [(str(i), [0]) for i in range(10_000)]


@pytest.mark.parametrize(
    ("text", "ranks", "line"),
    [
        ("hello", [], "mpistrat: hello\n"),
        ("hello", [2], "mpistrat: rank 2: hello\n"),
        ("hello", {3, 0, 2}, "mpistrat: ranks 0, 2-3: hello\n"),
        ("two\nlines", [0], "mpistrat: rank 0: two\nlines\n"),
        ("rank 2 of 4 has waited", [2], "mpistrat: rank 2 of 4 has waited\n"),
        ("rank 2 of 4 has waited", [1], "mpistrat: rank 1: rank 2 of 4 has waited\n"),
        ("rank 23 has waited", [2], "mpistrat: rank 2: rank 23 has waited\n"),
    ],
)
def test_a_line_names_its_ranks_once(capsys, text, ranks, line):
    print_line(text, ranks)
    assert capsys.readouterr().err == line


def test_a_closed_standard_error_is_no_error(monkeypatch, tmp_path):
    file = (tmp_path / "stderr").open("w")
    file.close()
    for broken in (file, None):
        monkeypatch.setattr("sys.stderr", broken)
        print_line("standard error is closed", [0])
