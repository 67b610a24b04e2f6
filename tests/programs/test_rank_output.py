"""The output of several ranks: equal lines once, with the ranks that they came from."""

import re

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE

pytestmark = pytest.mark.launches

# On a busy machine ranks are further apart than the window.
HEAD = f"""
import logging, os, signal, warnings
from mpistrat.failures import logs
logs.WINDOW_S, logs._LAST_LINES_S = 5, 2
log = logging.getLogger("mpistrat")
{PRELUDE}
"""


def lines_of(tmp_path, program, ranks, code=0, limit_s=40, **variables):
    """Run `program`; return the lines of its standard error, without what the launcher adds."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + program)
    done = launch.run([script], ranks, limit_s, cwd=tmp_path, env=variables)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    marks = ("=====", "-----", "Abort(")
    return lines[: next((i for i, line in enumerate(lines) if line.startswith(marks)), None)]


def ranks_text(ranks):
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_lines_are_printed_once_and_a_ranks_own_with_its_number(tmp_path, ranks):
    lines = lines_of(
        tmp_path,
        'log.warning("all of %d", size)\n'
        'log.error("own %d", rank)\n'
        'if rank > 0:\n    log.warning("not rank 0")\n'
        'log.info("too quiet")\n',
        ranks,
    )
    own = [f"mpistrat: rank {rank}: own {rank}" for rank in range(ranks)]
    others = f"mpistrat: {ranks_text(range(1, ranks))}: not rank 0"
    assert lines[0] == f"mpistrat: {ranks_text(range(ranks))}: all of {ranks}"
    assert sorted(lines[1:]) == sorted([*own, others])


def test_equal_warnings_are_printed_once_in_their_usual_form(tmp_path):
    ranks = 3
    lines = lines_of(
        tmp_path,
        'warnings.warn("this will change", FutureWarning)\nwarnings.warn(f"strange {rank}")\n',
        ranks,
        PYTHONWARNINGS="",
    )
    number = HEAD.count("\n") + 1
    script = tmp_path / "program.py"
    assert lines[:2] == [
        f"mpistrat: {ranks_text(range(ranks))}: {script}:{number}: FutureWarning: this will change",
        '  warnings.warn("this will change", FutureWarning)',
    ]
    assert sorted(lines[2::2]) == [
        f"mpistrat: rank {rank}: {script}:{number + 1}: UserWarning: strange {rank}"
        for rank in range(ranks)
    ]
    assert set(lines[3::2]) == {'  warnings.warn(f"strange {rank}")'}


def test_who_shows_warnings_in_another_way_keeps_it(tmp_path):
    lines = lines_of(
        tmp_path,
        """
from mpi4py.MPI import COMM_WORLD
ours = warnings.showwarning
with warnings.catch_warnings(record=True) as caught:
    ms.MPIStrategy(COMM_WORLD.Dup())
    warnings.warn("recorded")
    assert [str(each.message) for each in caught] == ["recorded"]
assert warnings.showwarning is ours
mine = []
warnings.showwarning = lambda *args, **kwargs: mine.append(args)
ms.MPIStrategy(COMM_WORLD.Dup())
warnings.warn("mine")
assert len(mine) == 1
""",
        2,
    )
    assert lines == []


def test_a_program_with_its_own_handlers_prints_itself(tmp_path):
    lines = lines_of(
        tmp_path,
        'logging.basicConfig(format=f"mine {rank}: %(message)s")\nlog.warning("a line")\n',
        3,
    )
    assert sorted(lines) == [f"mine {rank}: a line" for rank in range(3)]


def test_what_is_logged_at_the_very_end_is_printed(tmp_path):
    lines = lines_of(
        tmp_path,
        'import atexit\natexit.register(log.warning, "in the exit")\n'
        'if rank == last:\n    time.sleep(1)\nlog.warning("%d is done", rank)\n',
        3,
    )
    done = [f"mpistrat: rank {rank}: {rank} is done" for rank in range(3)]
    # What runs before the last round still goes through rank 0.
    assert sorted(lines) == [*done, "mpistrat: ranks 0-2: in the exit"]


@pytest.mark.parametrize("level", [None, "info", "debug"])
def test_a_healthy_run_is_quiet_unless_asked(tmp_path, level):
    lines = lines_of(
        tmp_path,
        """
with strategy.scope():
    weight = ms.Variable(np.ones(3))
checkpoint = ms.Checkpoint(weight=weight)
checkpoint.write("x.h5")
checkpoint.restore("x.h5")
strategy.reduce("sum", np.ones(5))
""",
        3,
        **({} if level is None else {"MPISTRAT_LOG": level}),
    )
    text = "\n".join(lines)
    if level is None:
        assert lines == []
        return
    made, *rest = lines
    assert made.startswith("mpistrat: ranks 0-2: MPIStrategy: size 3, nodes 1, launcher ")
    assert "device cpu:0, " in made
    assert re.search(r"^mpistrat: rank 0: Checkpoint \S*x.h5 written in \d+\.\d\d s$", text, re.M)
    assert re.search(r"^mpistrat: rank 0: Checkpoint \S*x.h5 restored in \d+\.\d\d s$", text, re.M)
    path = "mpistrat: ranks 0-2: reduce: 5 x float64 by "
    assert any(line.startswith(path) for line in rest) == (level == "debug")


def test_a_bad_level_ends_the_job_with_the_names_of_the_good_ones(tmp_path):
    lines = lines_of(tmp_path, "", 3, code=1, MPISTRAT_LOG="loud")
    assert lines[0].startswith("mpistrat: ranks 0-2 of 3 failed at program.py:")
    assert lines[-1].startswith("ValueError: The setting MPISTRAT_LOG cannot be 'loud'. Use one of")


def test_a_wait_is_reminded_of_in_one_line_that_names_the_rank_once(tmp_path):
    lines = lines_of(
        tmp_path,
        'if rank == last:\n    time.sleep(2)\nstrategy.reduce("sum", 1)\n',
        3,
        MPISTRAT_WAIT_NOTICE_S="0.5",
    )
    assert re.match(r"mpistrat: rank 0 of 3 has waited for \d+ s in reduce at", lines[0])
    assert sum("has waited" in line for line in lines) == 1


def test_without_the_side_channel_each_rank_prints_its_own(tmp_path):
    lines = lines_of(tmp_path, 'log.warning("a line")\n', 3, MPISTRAT_WATCH="off")
    assert sorted(lines) == [f"mpistrat: rank {rank}: a line" for rank in range(3)]


def test_a_rank_0_that_is_stopped_does_not_silence_the_others(tmp_path):
    lines = lines_of(
        tmp_path,
        """
if rank == 0:
    if os.fork() == 0:
        log.warning("from a fork")
        time.sleep(6)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    time.sleep(2)
    began = time.monotonic()
    log.warning("is there anybody?")
    assert time.monotonic() - began < 0.5
strategy.reduce("sum", 1)
""",
        3,
    )
    assert lines[0] == "mpistrat: rank 0: from a fork"
    assert sorted(lines[1:]) == [f"mpistrat: rank {rank}: is there anybody?" for rank in (1, 2)]


def test_last_lines_are_printed_once(tmp_path):
    lines = lines_of(
        tmp_path,
        'if rank != 1:\n    logs.print_last("rank 1 is gone.")\n    os._exit(1)\ntime.sleep(60)\n',
        4,
        code=1,
    )
    assert lines == ["mpistrat: ranks 0, 2-3: rank 1 is gone."]


def test_a_job_that_floods_is_not_slowed_down_or_ended(tmp_path):
    lines = lines_of(
        tmp_path,
        """
began = time.monotonic()
for i in range(20_000):
    log.warning("line %d", i)
took_s = time.monotonic() - began
assert took_s < 15, took_s
strategy.reduce("sum", 1)
""",
        3,
    )
    dropped = sum(int(m[1]) for m in re.finditer(r"(\d+) lines were dropped", "\n".join(lines)))
    assert 0 < len(lines) <= 60_000
    assert dropped < 60_000


def test_a_job_that_fails_says_it_in_few_lines(tmp_path):
    ranks = 4
    lines = lines_of(
        tmp_path,
        """
for i in range(3):
    log.warning("warning %d", i)
    warnings.warn(f"strange {i}")
def deep(depth):
    if depth:
        deep(depth - 1)
    all_reduce(np.ones(2 if rank == last else 3))
strategy.run(deep, args=(30,))
""",
        ranks,
        code=1,
        MPISTRAT_LOG="info",
    )
    text = "\n".join(lines)
    assert len(lines) < 40, text
    assert text.count("Traceback") == 1
    for i in range(3):
        assert f"mpistrat: {ranks_text(range(ranks))}: warning {i}" in lines
        assert text.count(f"UserWarning: strange {i}") == 1
    assert "CollectiveMismatchError" in text


def test_the_numbers_are_those_of_the_largest_strategy(tmp_path):
    lines = lines_of(
        tmp_path,
        """
from mpi4py.MPI import COMM_WORLD
halves = COMM_WORLD.Split(rank % 2)
ms.MPIStrategy(halves)
log.warning("all the same")
""",
        4,
    )
    assert lines == ["mpistrat: ranks 0-3: all the same"]


def test_strategies_on_parts_of_the_world_have_numbers_of_their_own(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import logging\nimport mpistrat as ms\nfrom mpi4py.MPI import COMM_WORLD\n"
        "from mpistrat.failures import logs\nlogs.WINDOW_S = 5\n"
        "part = COMM_WORLD.rank % 2\n"
        "strategy = ms.MPIStrategy(COMM_WORLD.Split(part))\n"
        'logging.getLogger("mpistrat").warning("part %d", part)\n'
    )
    done = launch.run([script], 4)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [
        f"mpistrat: ranks 0-1: part {part}" for part in range(2)
    ]


def test_nothing_is_lost_where_the_program_ends_mpi_itself(tmp_path):
    lines = lines_of(
        tmp_path,
        'log.warning("before %d", rank)\n'
        "from mpi4py import MPI\nMPI.Finalize()\n"
        'log.warning("after %d", rank)\n',
        3,
    )
    assert sorted(lines) == [
        f"mpistrat: rank {rank}: {when} {rank}" for rank in range(3) for when in ("after", "before")
    ]


def test_what_no_rank_can_start_is_reported_once(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import mpistrat as ms\nms.MPIStrategy(num_replicas=4, elastic=True)\n")
    done = launch.run([script], 3, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count("Start the program with") == 1, done.stderr
