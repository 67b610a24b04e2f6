"""Closures: a function by its name, its arguments as pickle, and what comes back.

Both travel between the ranks of one job. Variables, optimizers, iterators and the strategy go by
number, as each rank has them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.collectives.objects import join_object, split_object
from mpistrat.errors import ClosureInputError, OutOfRangeError
from mpistrat.system.callsite import UNKNOWN_PLACE, failure_site
from mpistrat.system.text import text_of
from mpistrat.values import localize
from mpistrat.variables.remote import RemoteVariable

if TYPE_CHECKING:
    from mpistrat.strategies.server_extended import ServerExtended

__all__ = [
    "FAILED",
    "Closure",
    "FunctionName",
    "Outcome",
    "Travels",
    "error_of",
    "find_function",
    "name_of_function",
    "pack_arguments",
    "run_closure",
    "unpack",
]

DONE, FAILED = 0, 1
"""The kinds of an outcome."""

_LENGTH = struct.Struct("<I")


class FunctionName(NamedTuple):
    """How a function is found on another rank."""

    module: str
    path: str
    digest: str
    """Of its code, empty where it has none in Python."""


class Travels:
    """Base of objects that travel by a token in place of themselves."""

    def _token(self) -> Any:
        """Return the token, or raise why there is none."""
        raise NotImplementedError


def name_of_function(what: str, function: Any) -> FunctionName:
    """Return the name of a function by which other ranks find the same, or raise `TypeError`."""
    if not callable(function):
        raise TypeError(f"{what} takes a function, not {function!r}.")
    module, path = _place_of(function)
    found = _look_up(module, path) if module and path and "<" not in path else None
    if found is None or found != function:
        raise TypeError(
            f"{what}: {function!r} travels by its name, but it is not what the workers find as "
            f"{f'{module}.{path}' if path else 'a name'}. Define the function at module level; no "
            "lambda, local function, functools.partial or method of an object without a name."
        )
    return FunctionName(module, path, _digest(function))


def _place_of(function: Any) -> tuple[str, str]:
    """Return the module and the path in it by which a function is to be found."""
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


def _look_up(module: str, path: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def _digest(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return hashlib.blake2b(repr(_facts(code)).encode(), digest_size=8).hexdigest()


def _facts(code: CodeType) -> tuple[Any, ...]:
    """Return what makes code do what it does, whatever its place in a file."""
    constants = [
        _facts(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))  # whose order differs from process to process
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


_found: dict[str, Callable[..., Any]] = {}
"""Functions that were looked up before, by their names."""


def find_function(text: str) -> Callable[..., Any]:
    """Return the function of a name, or raise why this rank has another one."""
    known = _found.get(text)
    if known is not None:
        return known
    name = FunctionName(*text.split("\0"))
    function: Callable[..., Any] | None = _look_up(name.module, name.path)
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


class Closure:
    """A call that waits for a worker, runs on one, or has an outcome."""

    __slots__ = ("body", "buffers", "generation", "name", "number", "outcome", "rank", "since_ns")

    def __init__(
        self, number: int, name: str, body: bytes, buffers: list[np.ndarray], generation: int
    ) -> None:
        self.number = number
        self.name = name
        self.body: bytes | None = body
        """What is sent, until there is an outcome."""
        self.buffers = buffers
        self.generation = generation
        """How many errors were raised before it was scheduled."""
        self.rank: int | None = None
        """Where it runs."""
        self.since_ns = 0
        self.outcome: Outcome | Exception | None = None

    def end(self, outcome: Outcome | Exception) -> None:
        """Note the outcome, or the error in place of one, and drop the arguments."""
        self.outcome, self.body, self.buffers = outcome, None, []

    def __repr__(self) -> str:
        return f"{self.name} #{self.number}"


class Outcome(NamedTuple):
    """What a closure has returned or raised, as it travels."""

    kind: int
    body: Any
    buffers: Sequence[np.ndarray]


def pack_arguments(
    extended: ServerExtended, name: FunctionName, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, list[np.ndarray]]:
    """Return function and arguments as they travel, a copy of all."""
    text = "\0".join(name).encode()
    head = _LENGTH.pack(len(text)) + text
    if not args and not kwargs:
        return head, []
    try:
        data, buffers = split_object((tuple(args), dict(kwargs)), _substitutes(extended))
    except (ValueError, TypeError) as error:
        _add_note(error, f"In an argument of {name.path}, which travels as pickle.")
        raise
    except Exception as error:  # objects raise what they like
        raise TypeError(
            f"schedule: an argument of {name.path} cannot be pickled: {error}. Pass what it is "
            "made of, such as arrays, numbers and dicts."
        ) from error
    return head + data, buffers


def _substitutes(extended: ServerExtended) -> Callable[[Any], Any | None]:
    """Return what gives a token for what every rank has by a number."""

    def token(thing: Any) -> Any | None:
        if isinstance(thing, RemoteVariable) and thing.strategy is extended._container:
            number = next((i for i, v in enumerate(extended._variables) if v is thing), None)
            if number is None:
                raise TypeError(
                    f"The slot {thing.name!r} cannot travel. Pass the variable and the optimizer."
                )
            return "variable", number
        if isinstance(thing, Travels):
            return thing._token()
        if thing is extended._container:
            return ("strategy",)
        for number, each in enumerate(extended._optimizers):
            if each is thing:
                return "optimizer", number
        return None

    return token


def unpack(extended: ServerExtended, data: Any, body: Any, buffers: Sequence[np.ndarray]) -> Any:
    """Return an object that has travelled; without `data` there are no iterators in it."""

    def find(token: Any) -> Any:
        kind, *details = token
        if kind == "variable":
            return extended._variables[details[0]]
        if kind == "optimizer":
            return extended._optimizers[details[0]]
        if kind == "strategy":
            return extended._container
        if data is None:
            raise TypeError("An iterator of a worker cannot leave it.")
        return data.iterator(*details)

    return join_object(body, buffers, find)


def run_closure(
    extended: ServerExtended, data: Any, body: Any, buffers: Sequence[np.ndarray]
) -> Outcome:
    """Run what `pack_arguments` has packed, and return the outcome, whatever happens.

    `data` gives the iterators of this worker.
    """
    process, code = os.getpid(), 0
    extended._closure_depth += 1
    try:
        with extended._container.scope():
            result = _call(extended, data, body, buffers)
            outcome = _outcome_of_result(extended, result)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() == process:
            outcome = _outcome_of_error(extended, error, body)
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
            code = 1
    finally:
        extended._closure_depth -= 1
        if os.getpid() != process:  # a fork that the closure has made is no worker
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return outcome


def _call(extended: ServerExtended, data: Any, body: Any, buffers: Sequence[np.ndarray]) -> Any:
    text, rest = _split(body)
    function = find_function(text)
    if not rest:
        return function()
    args, kwargs = unpack(extended, data, rest, buffers)
    return function(*args, **kwargs)


def _split(body: Any) -> tuple[str, memoryview]:
    """Return the name of the function of a closure, as text, and its arguments."""
    view = memoryview(body)
    (length,) = _LENGTH.unpack_from(view)
    begin = _LENGTH.size + length
    return bytes(view[_LENGTH.size : begin]).decode(), view[begin:]


def _site_of(error: BaseException, body: Any) -> str:
    """Return where a closure has failed; outside of the user's code, what it was to call."""
    site = failure_site(error.__traceback__)
    if site != UNKNOWN_PLACE:
        return site
    name = FunctionName(*_split(body)[0].split("\0"))
    code = getattr(_look_up(name.module, name.path), "__code__", None)
    if code is None:
        return name.path
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _outcome_of_result(extended: ServerExtended, result: Any) -> Outcome:
    if result is None:
        return Outcome(DONE, b"", ())
    try:
        return Outcome(DONE, *split_object(localize(result), _substitutes(extended)))
    except Exception as error:
        raise TypeError(
            f"The result of a closure, of type {type(result).__name__}, cannot be pickled: "
            f"{error}. Return arrays, numbers, texts and nests of them."
        ) from error


def _outcome_of_error(extended: ServerExtended, error: BaseException, body: Any) -> Outcome:
    rank, site = extended._group.rank, _site_of(error, body)
    note = f"worker {extended._workers.index(rank)} (rank {rank}) at {site}"
    if isinstance(error, StopIteration):
        error = OutOfRangeError("The iterator of a data set has no further element.")
    elif not isinstance(error, Exception):
        error = RuntimeError(f"A closure has raised {type(error).__name__}: {text_of(error)}")
    _add_note(error, note)
    cause = error.__cause__ if isinstance(error, ClosureInputError) else None
    for given in ((error, cause), (error, None if cause is None else _in_words(cause))):
        try:
            data, buffers = split_object(given, _nothing)
            copied, _ = join_object(data, buffers, _same)
            if type(copied) is type(error):
                return Outcome(FAILED, data, buffers)
        except Exception:
            continue
    replaced = _in_words(error)
    _add_note(replaced, note)
    return Outcome(FAILED, *split_object((replaced, None), _nothing))


def _add_note(error: BaseException, note: str) -> None:
    """Add a line that tracebacks show, where Python does so."""
    notes: Any = getattr(error, "__notes__", [])
    error.__dict__["__notes__"] = [*notes, note]


def _in_words(error: BaseException) -> RuntimeError:
    """Return an error that can travel in the place of one that cannot."""
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
