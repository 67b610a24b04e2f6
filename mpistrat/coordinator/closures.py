"""Closures: calls that the chief sends to workers, and the results that they send back.

The chief sends the name of the function, a digest of its code, and the arguments as pickle. In
place of a variable, an optimizer, an iterator or the strategy it sends a number, because each rank
has its own copy of the object.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import reprlib
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.collectives.objects import join_object, split_object
from mpistrat.errors import ClosureInputError, OutOfRangeError, WorkerLostError
from mpistrat.parameter_server.remote_variable import RemoteVariable
from mpistrat.system.callsite import UNKNOWN_PLACE, failure_site
from mpistrat.system.text import array_type, brief, small_values, text_of
from mpistrat.values import localize

if TYPE_CHECKING:
    from mpistrat.parameter_server.server_job import ServerJob


_LENGTH = struct.Struct("<I")


class FunctionName(NamedTuple):
    """Name under which other ranks find a function."""

    module: str
    path: str
    digest: str
    """Digest of its code. Empty if the function is not written in Python."""


def name_of_function(what: str, function: Any) -> FunctionName:
    """Return the name under which other ranks find a function, or raise `TypeError`."""
    if not callable(function):
        raise TypeError(f"{what} takes a function, not {function!r}.")
    module, path = _place_of(function)
    name = FunctionName(module, path, _digest(function))
    # Local functions and lambdas have "<locals>" or "<lambda>" in their names.
    found = look_up(name) if module and path and "<" not in path else None
    if found is None or found != function:
        raise TypeError(
            f"{what}: {function!r} travels by its name, but it is not what the workers find as "
            f"{f'{module}.{path}' if path else 'a name'}. Define the function at module level; no "
            "lambda, local function, functools.partial or method of an object without a name."
        )
    return name


def _place_of(function: Any) -> tuple[str, str]:
    """Return the module of a function and its path there. Both are empty if there is no name."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type | ModuleType):
        module = getattr(function, "__module__", None)
        return module or "", getattr(function, "__qualname__", "")
    for module in ("__main__", type(owner).__module__, getattr(function, "__module__", "")):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        for name, each in names.items():
            if each is owner:
                return module, f"{name}.{function.__name__}"
    return "", ""


def look_up(name: FunctionName) -> Any:
    """Return the object that has this name on this rank, or ``None``."""
    try:
        found: Any = importlib.import_module(name.module)
        for attribute in name.path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return None
    return found


def _digest(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return hashlib.blake2b(repr(_facts(code)).encode(), digest_size=8).hexdigest()


def _facts(code: CodeType) -> tuple[Any, ...]:
    """Return the parts of code that decide what it does, without its position in the file."""
    constants = [
        _facts(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))  # a set has a different order in each process
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


_found: dict[str, Callable[..., Any]] = {}
"""Functions that were looked up before, keyed by their names."""


def find_function(text: str) -> Callable[..., Any]:
    """Return the function with this name.

    Raises `RuntimeError` if this rank has no such function, or one with different code.
    """
    known = _found.get(text)
    if known is not None:
        return known
    name = FunctionName(*text.split("\0"))
    function: Callable[..., Any] | None = look_up(name)
    if function is None or not callable(function):
        raise RuntimeError(
            f"This worker has no function {name.module}.{name.path}. All ranks must run the same "
            "program, and define at module level what is scheduled."
        )
    if _digest(function) != name.digest:
        raise RuntimeError(
            f"The code of {name.module}.{name.path} on this worker differs from the chief's. All "
            "ranks must run the same version of the program."
        )
    _found[text] = function
    return function


def join_body(name: FunctionName, arguments: bytes = b"") -> bytes:
    """Return the bytes to send for a function name and packed arguments."""
    text = "\0".join(name).encode()
    return _LENGTH.pack(len(text)) + text + arguments


def split_body(body: Any) -> tuple[str, memoryview]:
    """Return the name of the function of a closure, as a string, and its packed arguments."""
    view = memoryview(body)
    (length,) = _LENGTH.unpack_from(view)
    begin = _LENGTH.size + length
    return bytes(view[_LENGTH.size : begin]).decode(), view[begin:]


_DONE, _FAILED = 0, 1
"""Kinds of outcomes."""


class Travels:
    """Base class of objects in place of which a token is sent."""

    def _token(self) -> Any:
        """Return the token, or raise an error if the object cannot be sent."""
        raise NotImplementedError


class Closure:
    """A call that waits for a worker, runs on one, or has an outcome."""

    __slots__ = (
        "body",
        "buffers",
        "generation",
        "is_independent",
        "killed",
        "name",
        "number",
        "outcome",
        "rank",
        "since_ns",
    )

    def __init__(
        self, number: int, name: str, generation: int, is_independent: bool = False
    ) -> None:
        self.number = number
        self.name = name
        self.body: bytes | None = None
        """The bytes to send; dropped once there is an outcome."""
        self.buffers: list[np.ndarray] = []
        self.generation = generation
        """Number of errors that were raised before it was scheduled."""
        self.is_independent = is_independent
        """Whether only the caller that asks for its result sees its error; it cancels nothing."""
        self.killed: tuple[str, ...] = ()
        """Names of the workers that were lost while they ran it."""
        self.rank: int | None = None
        """Rank of the worker that runs it."""
        self.since_ns = 0
        self.outcome: Outcome | Exception | None = None

    def has_failed(self) -> bool:
        """Return whether it has raised an error or killed its workers."""
        outcome = self.outcome
        if isinstance(outcome, Outcome):
            return outcome.kind == _FAILED
        return isinstance(outcome, WorkerLostError)

    def error(self) -> Exception:
        """Return a new copy of the error that it ended with."""
        outcome = self.outcome
        if isinstance(outcome, Outcome):
            return error_of(outcome)
        assert outcome is not None
        # Copy it, because each raise adds a traceback to the object, and the error may be raised
        # several times.
        error = type(outcome)(*outcome.args)
        error.__dict__.update(outcome.__dict__)
        return error

    def end(self, outcome: Outcome | Exception) -> None:
        """Store the outcome, or the error if there is none, and drop the arguments."""
        self.outcome, self.body, self.buffers = outcome, None, []

    def __repr__(self) -> str:
        return f"{self.name} #{self.number}"


class Outcome(NamedTuple):
    """Result or error of a closure, in the form in which it is sent."""

    kind: int
    body: Any
    buffers: Sequence[np.ndarray]


def pack_arguments(
    job: ServerJob, name: FunctionName, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, list[np.ndarray]]:
    """Return a copy of the function name and the arguments, ready to send."""
    if not args and not kwargs:
        return join_body(name), []
    try:
        data, buffers = split_object((tuple(args), dict(kwargs)), _substitutes(job))
    except (ValueError, TypeError) as error:
        _add_note(error, f"In an argument of {name.path}, which travels as pickle.")
        raise
    except Exception as error:  # pickling an object may raise any exception
        raise TypeError(
            f"schedule: an argument of {name.path} cannot be pickled: {error}. Pass what it is "
            "made of, such as arrays, numbers and dicts."
        ) from error
    return join_body(name, data), buffers


def _substitutes(job: ServerJob) -> Callable[[Any], Any | None]:
    """Return a function that returns the token to send for an object, or ``None``."""

    def token(thing: Any) -> Any | None:
        if isinstance(thing, RemoteVariable) and thing.strategy is job.strategy:
            number = next((i for i, v in enumerate(job.variables) if v is thing), None)
            if number is None:
                raise TypeError(
                    f"The slot {thing.name!r} cannot travel. Pass the variable and the optimizer."
                )
            return "variable", number
        if isinstance(thing, Travels):
            return thing._token()
        if thing is job.strategy:
            return ("strategy",)
        for number, each in enumerate(job.optimizers):
            if each is thing:
                return "optimizer", number
        return None

    return token


def unpack(job: ServerJob, data: Any, body: Any, buffers: Sequence[np.ndarray]) -> Any:
    """Return the object that was received. Without `data` it may not contain iterators."""

    def find(token: Any) -> Any:
        kind, *details = token
        if kind == "variable":
            return job.variables[details[0]]
        if kind == "optimizer":
            return job.optimizers[details[0]]
        if kind == "strategy":
            return job.strategy
        if data is None:
            raise TypeError("An iterator of a worker cannot leave it.")
        return data.iterator(*details)

    return join_object(body, buffers, find)


def run_closure(job: ServerJob, data: Any, body: Any, buffers: Sequence[np.ndarray]) -> Outcome:
    """Run a closure that `pack_arguments` has packed, and return its result or error.

    `data` holds the iterators of this worker.
    """
    process, code = os.getpid(), 0
    job.closure_depth += 1
    try:
        with job.strategy.scope():
            result = _call(job, data, body, buffers)
            outcome = _outcome_of_result(job, result)
    # Here the user ends the job, so this is not an outcome of the closure.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() == process:
            outcome = _outcome_of_error(job, error, body, buffers)
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
            code = 1
    finally:
        job.closure_depth -= 1
        if os.getpid() != process:  # the closure has forked, and the child is not a worker
            sys.stdout.flush()
            sys.stderr.flush()
            # Skip Python's exit handlers: they would call MPI in a process that is not a rank.
            os._exit(code)
    return outcome


def _call(job: ServerJob, data: Any, body: Any, buffers: Sequence[np.ndarray]) -> Any:
    text, rest = split_body(body)
    function = find_function(text)
    if not rest:
        return function()
    args, kwargs = unpack(job, data, rest, buffers)
    return function(*args, **kwargs)


def _site_of(error: BaseException, body: Any) -> str:
    """Return the line on which a closure has failed.

    If that is not in the user's code, return the place of the function that it calls.
    """
    site = failure_site(error.__traceback__)
    if site != UNKNOWN_PLACE:
        return site
    name = FunctionName(*split_body(body)[0].split("\0"))
    code = getattr(look_up(name), "__code__", None)
    if code is None:
        return name.path
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _outcome_of_result(job: ServerJob, result: Any) -> Outcome:
    if result is None:
        return Outcome(_DONE, b"", ())
    try:
        return Outcome(_DONE, *split_object(localize(result), _substitutes(job)))
    except Exception as error:
        raise TypeError(
            f"The result of a closure, of type {type(result).__name__}, cannot be pickled: "
            f"{error}. Return arrays, numbers, strings and nests of them."
        ) from error


def _outcome_of_error(
    job: ServerJob, error: BaseException, body: Any, buffers: Sequence[np.ndarray]
) -> Outcome:
    rank, site = job.group.rank, _site_of(error, body)
    call = describe_call(job, body, buffers)
    note = f"worker {job.workers.index(rank)} (rank {rank}) at {site}, in {call}"
    # The chief raises the error again, and a StopIteration would silently end a loop there.
    if isinstance(error, StopIteration):
        error = OutOfRangeError("The iterator of a dataset has no further element.")
    elif not isinstance(error, Exception):
        error = RuntimeError(f"A closure has raised {type(error).__name__}: {text_of(error)}")
    _add_note(error, note)
    cause = error.__cause__ if isinstance(error, ClosureInputError) else None
    for given in ((error, cause), (error, None if cause is None else _in_words(cause))):
        try:
            # Try to unpickle it here too. Some exceptions can be pickled but not unpickled, because
            # their __init__ takes different arguments than `args`. The chief would then raise the
            # error of unpickling in place of the closure's.
            data, buffers = split_object(given, _nothing)
            copied, _ = join_object(data, buffers, _same)
            if type(copied) is type(error):
                return Outcome(_FAILED, data, buffers)
        except Exception:
            continue
    replaced = _in_words(error)
    _add_note(replaced, note)
    return Outcome(_FAILED, *split_object((replaced, None), _nothing))


def _add_note(error: BaseException, note: str) -> None:
    """Add a line that tracebacks show, in Python versions that show notes."""
    notes: Any = getattr(error, "__notes__", [])
    error.__dict__["__notes__"] = [*notes, note]


def _in_words(error: BaseException) -> RuntimeError:
    """Return an error with the same text, for one that cannot be pickled."""
    lines = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {text_of(error)}\n{lines}")


def _nothing(thing: Any) -> None:
    return None


def _same(token: Any) -> Any:
    return token


def error_of(outcome: Outcome) -> Exception:
    """Return the error that a closure has raised."""
    try:
        error, cause = join_object(outcome.body, outcome.buffers, _same)
    except Exception as reason:
        return RuntimeError(f"A closure has failed, by an error that cannot be read here: {reason}")
    error.__cause__ = cause
    found: Exception = error
    return found


_MAX_CHARACTERS = 400


class _Shortened(reprlib.Repr):
    """Short forms of arguments, long enough to recognize the closure."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = 100

    def repr1(self, x: Any, level: int) -> str:
        """Return the short form of any object; for large arrays only dtype and shape."""
        if isinstance(x, np.ndarray):
            return brief(x) if small_values(x) is not None else f"array {array_type(x)}"
        return super().repr1(x, level)


class _Named:
    """Placeholder for an object that is sent by number, such as a variable."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_shortened = _Shortened()


def describe_call(job: ServerJob, body: Any, buffers: Sequence[np.ndarray]) -> str:
    """Return the call of a closure as text, such as ``step(3, rate=0.1)``.

    Takes the bytes and buffers that `pack_arguments` returned. It never raises, and creates no
    iterators or other objects on this rank.
    """
    text, rest = split_body(body)
    path = FunctionName(*text.split("\0")).path
    if not rest:
        return f"{path}()"

    def find(token: Any) -> _Named:
        kind, *details = token
        if kind == "variable":
            return _Named(f"variable {job.variables[details[0]].name!r}")
        if kind == "optimizer":
            return _Named(type(job.optimizers[details[0]]).__name__)
        if kind == "iterator":
            return _Named(f"iterator of {'.'.join(details[2][:2])}")
        return _Named(str(kind))

    try:
        args, kwargs = join_object(rest, buffers, find)
        shown = [_shortened.repr(each) for each in args]
        shown += [f"{name}={_shortened.repr(each)}" for name, each in kwargs.items()]
    except Exception:  # unpickling an object, and its repr, may raise any exception
        shown = ["..."]
    joined = " ".join(", ".join(shown).split())
    if len(joined) > _MAX_CHARACTERS:
        joined = f"{joined[: _MAX_CHARACTERS - 3]}..."
    return f"{path}({joined})"
