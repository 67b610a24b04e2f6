"""Programs that go wrong: run on several ranks, watched, and cleaned up after."""

import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.processes import Program
from mpistrat.testing import launch

PRELUDE = """
import os, sys, time
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
last = size - 1
def all_reduce(value):
    return ms.get_replica_context().all_reduce("sum", value)
"""
MARKS = """
with open(f"process-{rank}", "w") as file:
    print(os.getpid(), file=file)
"""
LAUNCH_S = 30
"""How long a program may take on a busy machine until its strategy is there."""


@dataclass(frozen=True)
class Finished:
    """What a program has left."""

    code: int
    text: str
    """Its standard error without what the launcher adds."""
    all_text: str
    """All that it has printed."""
    after_s: float
    """Seconds from the moment when all ranks had their strategy."""


@dataclass(frozen=True)
class Case:
    """A program and what is to come of it."""

    name: str
    program: str
    """``#> NAME`` at the end of a line marks it for `expected`."""
    expected: tuple[str, ...] = ()
    """What standard error must hold; ``<NAME>`` is the place of the line that is marked so."""
    ranks: int = 4
    timeout_s: float = 30
    """The time limit of the program. A case in which nobody waits so long must end before."""
    waits: bool = False
    """Whether only the limit can tell that something is wrong."""
    is_healthy: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


LAUNCHERS = re.compile(
    # Open MPI puts its messages between two lines of dashes, and its runtime's in brackets.
    r"^-{60,}\n.*?(^-{60,}\n|\Z)|^={60,}\n.*?^={60,}\n|^(\[|Abort\(|YOUR APPLICATION).*\n?",
    re.MULTILINE | re.DOTALL,
)


def ours(text):
    """Return the lines of a standard error that are not the launcher's."""
    # Open MPI ends what it says of an abort with a NUL.
    lines = LAUNCHERS.sub("", text.replace("\0", "")).split("\n")
    return "\n".join(line for line in lines if line.strip())


def run_case(case, folder: Path) -> Finished:
    """Run the program of `case` in the new `folder`, and leave no process behind."""
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(PRELUDE + MARKS + case.program)
    variables = {"MPISTRAT_TIMEOUT_S": str(case.timeout_s)} | case.variables
    launched = launch.Launched([script], case.ranks, cwd=folder, env=variables)
    try:
        done = launched.finish(LAUNCH_S + case.timeout_s)
        ended = time.time()
    finally:
        end_processes(folder)
    marks = list(folder.glob("process-*"))
    began = max((mark.stat().st_mtime for mark in marks), default=ended)
    text = done.stdout + done.stderr
    return Finished(done.returncode, ours(done.stderr), text, ended - began)


# Runs the program in each folder that is given, and writes down there what this rank catches.
ONE_AFTER_THE_OTHER = """
import os, runpy, sys, traceback
from mpistrat.testing.launch import rank_and_size
for folder in sys.argv[1:]:
    os.chdir(folder)
    caught = "nothing"
    try:
        runpy.run_path("program.py")
    except Exception as error:
        caught = "".join(traceback.format_exception_only(error))
    with open(f"caught-{rank_and_size()[0]}", "w") as file:
        file.write(caught)
"""


def catch_each(cases, folder: Path, ranks: int) -> dict[str, list[str]]:
    """Run all programs in one job; return what each rank catches of each case, by name."""
    folders = [folder / str(number) for number in range(len(cases))]
    for case, each in zip(cases, folders, strict=True):
        each.mkdir()
        (each / "program.py").write_text(PRELUDE + case.program)
    done = launch.run(["-c", ONE_AFTER_THE_OTHER, *folders], ranks, LAUNCH_S)
    assert (done.returncode, ours(done.stderr)) == (0, "")
    return {
        case.name: [(each / f"caught-{rank}").read_text() for rank in range(ranks)]
        for case, each in zip(cases, folders, strict=True)
    }


def end_processes(folder: Path):
    """Kill the ranks that have outlived their launcher, a stopped one for example."""
    script = os.fsencode(folder / "program.py")
    for mark in folder.glob("process-*"):
        pid = int(mark.read_text() or 0)
        with contextlib.suppress(OSError):
            if pid and script in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


UNSEEN = """
"$@"
code=$?
[ $code -eq 137 ] && sleep 30
exit $code
"""
"""A process between the launcher and its rank, which hides the rank's death from the launcher."""


def run_unseen(case, folder: Path) -> tuple[str, str]:
    """Run a case whose launcher does not notice killed ranks; return what it has printed."""
    script, shell = folder / "program.py", folder / "unseen.sh"
    script.write_text(PRELUDE + MARKS + case.program)
    shell.write_text(UNSEEN)
    command = [*mpiexec(case.ranks), "sh", str(shell), sys.executable, str(script)]
    variables = launch.environment({"MPISTRAT_EXIT_GRACE_S": "1"})
    program = Program(command, variables, cwd=folder)
    try:
        assert program.wait(25) != 0
    finally:
        program.kill()
        end_processes(folder)
    return program.stdout(), program.stderr()


def processes_of(folder):
    """Return the processes that run the program in `folder`."""
    script = os.fsencode(folder / "program.py")
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if script in (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except OSError:
            pass
    return found


def assert_nothing_is_left(folder):
    """Assert that no process has outlived the job, and nothing of ours lies in /dev/shm."""
    end = time.monotonic() + 5
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.02)
    assert not processes_of(folder)
    assert not [name for name in os.listdir("/dev/shm") if "mpistrat" in name]


def squeezed(text):
    """Return `text` with single spaces: the columns of a table are as wide as their entries."""
    return re.sub(" +", " ", text)


def check_output(case, text: str, head: str = PRELUDE):
    """Assert that `text`, said of the program after `head`, holds all that is expected."""
    lines = (head + case.program).split("\n")
    marks = ((re.search(r"#> (\w+)$", line), i) for i, line in enumerate(lines, 1))
    places = {match[1]: f"program.py:{number}" for match, number in marks if match}
    for text_part in case.expected:
        for name, place in places.items():
            text_part = text_part.replace(f"<{name}>", place)
        assert text_part in squeezed(text), f"{text_part!r} is not in:\n{text}"


def check(case, done: Finished):
    """Assert that the program has ended as `case` says."""
    if case.is_healthy:
        said = [each for each in done.text.split("\n") if each and "before collective" not in each]
        assert (done.code, said) == (0, []), done.all_text
        return
    # Hydra takes the code of a process that ends itself, and kills the others at once.
    is_hydras = case.name == "os._exit(0)" and not launch.is_open_mpi()
    assert done.code != 0 or is_hydras, done.all_text
    limit_s = (case.timeout_s if case.waits else 0) + 5
    assert done.after_s < limit_s, f"{done.after_s:.1f} s:\n{done.all_text}"
    assert done.text.count("\n") < 40, done.all_text
    assert done.text.count("Traceback") <= 1, done.all_text
    check_output(case, done.text, PRELUDE + MARKS)
