"""Watch of one rank: starts the recorder before the program, and samples the lines of its threads.

It runs in programs that do not use mpistrat, so it must not import the package: that would change
their start, and how they end. It takes two modules of the package from their files.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import importlib.util
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[2]
_TICK_S = 0.25
_MAX_FRAMES = 16
_MAX_THREADS = 16
_RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID"),
    "PMIX_RANK",
)
_OF_MPI_4 = ("PMPI_Barrier_init", "PMPI_Neighbor_alltoallw_init", "PMPI_Pready_list")
_FIND_LIBRARY = """
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
for line in open("/proc/self/maps"):
    if "/libmpi" in line:
        print(line.split()[-1])
        break
"""


def _load(name: str) -> Any:
    """Return a module of the package, from its file, without the package."""
    path = _PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"_mpistrat_watch_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


_settings = _load("settings")
_callsite = _load("system.callsite")
_agreements = _load("watch.startup.mpistrat_watch_agreements")


def begin() -> None:
    """Start the watch in this process, if it is a rank and the environment asks for it."""
    variables = _settings.environment()
    if "MPISTRAT_WATCH_AFTER_S" not in variables or not _is_python_program():
        return
    rank = next((int(variables[name]) for name in _RANK_VARIABLES if name in variables), None)
    address = variables.get("MPISTRAT_WATCH_ADDRESS", "")
    if rank is None and not address:
        return
    try:
        settings = _settings.Settings.parse(variables)
    except ValueError as error:
        _refuse(str(error))
    if not settings.watch:
        _refuse("MPISTRAT_WATCH=off forbids the sockets that the watch needs.")
    # First, because `_mpi_library` may start a second Python, which would be taken for a rank.
    _hide_from_children(variables)
    library = _open_recorder() or _load("watch.startup.mpistrat_watch_bare").BareSender()
    is_given = bool(address)
    if not is_given and rank == 0:
        address = _start_collector(settings, variables)
    host, port, key = (address or "::").rsplit(":", 2)
    library.recorder_shares_address(0 if is_given else 1)
    _Sampler(library).start(host, port, key, -1 if rank is None else rank)


def _hide_from_children(variables: Any) -> None:
    """Remove the variables of the watch: programs that the rank starts are not ranks."""
    for name in ("MPISTRAT_WATCH_ADDRESS", "MPISTRAT_WATCH_AFTER_S"):
        variables.pop(name, None)
    own = os.path.dirname(os.path.abspath(__file__))
    folders = variables.pop("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(each for each in folders if each and os.path.abspath(each) != own)
    if rest:
        variables["PYTHONPATH"] = rest


def _is_python_program() -> bool:
    """Return whether this process is not the watch itself, which runs the program afterwards."""
    own = sys.orig_argv[1:] if hasattr(sys, "orig_argv") else []
    return own[:2] not in (["-m", "mpistrat.watch"], ["-m", "mpistrat.watch.collector"])


def _refuse(why: str) -> Any:
    # Not an exception: Python's `site` would print it, and start the program without the watch.
    os.write(2, f"mpistrat watch: {why}\n".encode())
    os._exit(2)


def _open_recorder() -> Any:
    """Load the recorder into the global scope, where it comes before the MPI library."""
    path = _mpi_library()
    # Several builds, because mpi4py calls newer functions of MPI if it finds them. A recorder that
    # has them, above a library that lacks them, would end the program at its first call.
    name = "_recorder.abi3.so"
    if path is not None:
        library = ctypes.CDLL(path or None, os.RTLD_LAZY | os.RTLD_LOCAL)
        if all(hasattr(library, each) for each in _OF_MPI_4):
            large = "_c" if hasattr(library, "PMPI_Allreduce_init_c") else ""
            name = f"_recorder_4{large}.abi3.so"
    try:
        recorder = ctypes.CDLL(str(_PACKAGE / "watch" / name), os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError:
        return None
    recorder.recorder_version.restype = ctypes.c_ulonglong
    recorder.recorder_note.argtypes = (ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_int)
    return recorder


def _mpi_library() -> str | None:
    """Return the path of the MPI library that mpi4py will use."""
    try:
        _mpiabi: Any = importlib.import_module("mpi4py._mpiabi")
    except ImportError:
        return None
    try:
        if _mpiabi._registry.get("mpi4py.MPI"):
            chosen = _mpiabi.LIBMPI or _settings.environment().get("MPI4PY_LIBMPI")
            # No name stands for this process, which has the library already.
            return str(_mpiabi._dlopen_libmpi(chosen)._name or "")
        # This mpi4py shows its library only when it is imported. Here, that would bind its calls to
        # the library before the recorder is loaded.
        done = subprocess.run(
            [sys.executable, "-c", _FIND_LIBRARY], capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip() or None
    except (AttributeError, RuntimeError, OSError, subprocess.SubprocessError):
        return None


def _start_collector(settings: Any, variables: Any) -> str:
    """Start the collector as a child of rank 0, and return its address."""
    command = [sys.executable, "-m", "mpistrat.watch.collector"]
    # `_hide_from_children` has removed the variable, and the collector needs it.
    asked = {"MPISTRAT_WATCH_AFTER_S": str(settings.watch_after_s)}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=dict(variables) | asked,
    )
    assert child.stdout is not None
    address = ""
    with child.stdout as output:
        for line in output:  # the site's own start of Python may print there
            if line.startswith(b"mpistrat-watch "):
                address = line.decode().split()[1]
                break
    child.returncode = 0  # it outlives this process, and Python need not warn of that
    return address


class _Sampler:
    """Thread that tells the recorder four times a second where the program's threads are."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._dumps = os.memfd_create("mpistrat-watch")
        self._pid = os.getpid()
        self._is_over = False

    def start(self, host: str, port: str, key: str, rank: int) -> None:
        self._wrap()
        # The first function to be registered is the last to be called.
        atexit.register(self._end)
        numbers = (rank, self._dumps, self._dump_by_signal())
        if self._library.recorder_start(host.encode(), port.encode(), key.encode(), *numbers) == 0:
            threading.Thread(target=self._work, name="mpistrat-watch", daemon=True).start()

    def _wrap(self) -> None:
        exit_now = os._exit

        # `os._exit` runs no exit handlers, so the broken connection would look like a death.
        def leave(status: int) -> None:
            if os.getpid() == self._pid:
                self._library.recorder_leave(b"exit", int(status))
            exit_now(status)

        os._exit = leave  # type: ignore[assignment]

    def _dump_by_signal(self) -> int:
        """Let faulthandler write the main thread's stack at a signal; return its number, or 0."""
        # Not `dump_traceback_later`: its thread reads the stack while the program changes it, which
        # ends the program now and then where cores are shared.
        fcntl.fcntl(self._dumps, fcntl.F_SETFL, os.O_APPEND)  # the recorder empties the file
        for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
            if signal.getsignal(number) == signal.SIG_DFL:
                faulthandler.register(number, file=self._dumps, all_threads=False)
                return number
        return 0

    def _work(self) -> None:
        while not self._is_over:
            # Before the lines, which then are not older than these calls.
            version = self._library.recorder_version()
            self._note(self._lines(), version, 0)
            time.sleep(_TICK_S)

    def _note(self, lines: dict[str, Any], version: int, is_last: int) -> None:
        self._library.recorder_note(json.dumps(lines).encode(), version, is_last)

    def _lines(self) -> dict[str, Any]:
        """Return where each thread of the program is, by its number in the system."""
        frames = _callsite.frames_of_threads()
        found: dict[str, Any] = {"agreements": _agreements.agreements(), "bare": self._is_bare()}
        for thread in threading.enumerate()[:_MAX_THREADS]:
            frame = frames.get(thread.ident)
            is_main = thread is threading.main_thread()
            if frame is None or thread.ident == threading.get_ident():
                continue
            where = _where(frame)
            if where is not None or is_main:
                found[str(thread.native_id)] = where
        return found

    def _is_bare(self) -> bool:
        """Return whether MPI runs, and the recorder has seen no call of it."""
        mpi = sys.modules.get("mpi4py.MPI")
        has_begun = mpi is not None and hasattr(mpi, "Is_initialized") and mpi.Is_initialized()
        return has_begun and self._library.recorder_version() == 0

    def _end(self) -> None:
        """Tell the recorder that the program is over, and which exception has ended it."""
        self._is_over = True
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        after = None
        if error is not None and not isinstance(error, SystemExit):
            site = _callsite.failure_site(error.__traceback__)
            after = f"{type(error).__name__} at {site}"
        self._note({"end": True, "after": after}, self._library.recorder_version(), 1)


def _where(frame: FrameType | None) -> dict[str, Any] | None:
    """Return file, line, expression and stack of the innermost frame of the program."""
    stack: list[FrameType] = []
    while frame is not None:
        if _callsite.code_owners[frame.f_code.co_filename] is _callsite.CodeOwner.USER:
            stack.append(frame)
        frame = frame.f_back
    if not stack:
        return None
    inner = stack[0]
    return {
        "file": os.path.basename(inner.f_code.co_filename),
        "line": inner.f_lineno,
        "expression": _expression(inner.f_code, inner.f_lasti, inner.f_lineno),
        "stack": [
            f"{os.path.basename(each.f_code.co_filename)}:{each.f_lineno}"
            for each in stack[:_MAX_FRAMES]
        ],
    }


_expressions: dict[tuple[CodeType, int], str] = {}
_MAX_EXPRESSIONS = 1000


def _expression(code: CodeType, offset: int, line: int) -> str:
    found = _expressions.get((code, offset))
    if found is None:
        if len(_expressions) > _MAX_EXPRESSIONS:
            _expressions.clear()
        found = _expressions[code, offset] = _read_expression(code, offset, line)
    return found


def _read_expression(code: CodeType, offset: int, line: int) -> str:
    """Return the source of a call without its arguments, or the line where that is not known."""
    whole = linecache.getline(code.co_filename, line).strip()
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return whole
    positions = list(code.co_positions())
    first, last, start, end = positions[offset // 2]
    if None in (first, last, start, end):
        return whole
    rows = [linecache.getline(code.co_filename, row).encode() for row in range(first, last + 1)]
    if not rows or not rows[0]:
        return whole
    rows[-1] = rows[-1][:end]  # before the start is cut off: it may be the same row
    rows[0] = rows[0][start:]
    text = b"".join(rows).decode(errors="replace")
    try:
        node = ast.parse(f"({text})", mode="eval").body
    except (SyntaxError, ValueError):
        return whole
    return ast.unparse(node.func) if isinstance(node, ast.Call) else whole
