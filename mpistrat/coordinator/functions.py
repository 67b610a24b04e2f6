"""Functions by name: a closure travels as the name of its function, with a digest of the code."""

from __future__ import annotations

import hashlib
import importlib
import struct
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<I")


class FunctionName(NamedTuple):
    """How a function is found on another rank."""

    module: str
    path: str
    digest: str
    """Of its code, empty where it has none in Python."""


def name_of_function(what: str, function: Any) -> FunctionName:
    """Return the name of a function by which other ranks find the same, or raise `TypeError`."""
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


def look_up(name: FunctionName) -> Any:
    """Return what this rank has under a name, or ``None``."""
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
    """Return the name of a function and packed arguments as they travel."""
    text = "\0".join(name).encode()
    return _LENGTH.pack(len(text)) + text + arguments


def split_body(body: Any) -> tuple[str, memoryview]:
    """Return the name of the function of a closure, as text, and its arguments."""
    view = memoryview(body)
    (length,) = _LENGTH.unpack_from(view)
    begin = _LENGTH.size + length
    return bytes(view[_LENGTH.size : begin]).decode(), view[begin:]
