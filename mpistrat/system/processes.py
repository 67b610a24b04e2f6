"""Child programs: captures their output, and kills them with all their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class _Capture:
    """File to which a program writes, and its text."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self._final: str | None = None

    def text(self) -> str:
        if self._final is not None:
            return self._final
        # The program shares the file offset, so read without moving it.
        handle = self.file.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        self._final = self.text()
        self.file.close()


class Program:
    """A running program without input, in its own session."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        capture: bool = True,
    ) -> None:
        # Use files, not pipes, so that a process that outlives the launcher does not keep a reader
        # waiting.
        self._command = command
        self._out = _Capture() if capture else None
        self._err = _Capture() if capture else None
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._out.file if self._out else None,
                stderr=self._err.file if self._err else None,
                cwd=cwd,
                env=variables,
                # Ctrl-C reaches only the foreground process group of the terminal. The program is
                # in a separate session, so the parent decides how it ends.
                start_new_session=True,
            )
            """The program itself, which may be a launcher of other programs."""
        except BaseException:
            self._close()
            raise

    def stdout(self) -> str:
        """Return the standard output so far."""
        return self._out.text() if self._out else ""

    def stderr(self) -> str:
        """Return the standard error so far."""
        return self._err.text() if self._err else ""

    def pids(self) -> list[int]:
        """Return the process ids of the program and of all its descendants, the program first."""
        return descendants(self.process.pid)

    def kill(self, limit_s: float | None = None) -> None:
        """Kill the program and all its descendants with SIGKILL, and wait for its end."""
        send_signal(signal.SIGKILL, self.pids())
        self.wait(limit_s)

    def wait(self, limit_s: float | None) -> int:
        """Wait for the end of the program itself, and return its exit code."""
        code = self.process.wait(limit_s)
        if os.path.basename(os.fspath(self._command[0])).startswith("mpi"):
            remove_session_folder(self.process.pid)
        self._close()
        return code

    def _close(self) -> None:
        for capture in filter(None, (self._out, self._err)):
            capture.close()


def descendants(pid: int, command: Sequence[str] = ()) -> list[int]:
    """Return the ids of a process and of all its descendants, the process first.

    With a `command`, return only processes that run it.
    """
    found = [pid]
    parents = dict(_parents())
    # The list grows during the loop, so children of children are found too.
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return [each for each in found if not command or _command_of(each) == [*command]]


def _command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def prctl(option: int, value: int) -> None:
    """Set a property of this process. The arguments are numbers of Linux (prctl(2))."""
    ctypes.CDLL(None).prctl(option, value)


def send_signal(sign: signal.Signals, pids: Sequence[int]) -> None:
    """Send `sign` to all processes in `pids` that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def remove_session_folder(pid: int) -> None:
    """Remove the folder of an Open MPI launcher that has ended; a killed one leaves it behind."""
    # A later mpiexec that gets the same process id would find it, print "The PMIx server's listener
    # thread failed to start" and exit with 213 (seen with Open MPI 5.0).
    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{pid}"), ignore_errors=True)


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field, in parentheses, is the name, which may contain any character.
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
