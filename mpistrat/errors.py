"""Exceptions of mpistrat, and warnings for names that are deprecated in tf.distribute."""

from __future__ import annotations

import warnings

__all__ = [
    "CancelledError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ClosureInputError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "DataError",
    "EpochError",
    "EpochMismatchError",
    "EpochTimeoutError",
    "LaunchError",
    "MpistratError",
    "OutOfRangeError",
    "ReplicaDriftError",
    "ReplicaDriftWarning",
    "ReplicaLostError",
    "ScopeWarning",
    "UnavailableError",
    "WorkerLostError",
]


class MpistratError(Exception):
    """Base of every exception that mpistrat defines."""


class ContextError(MpistratError, RuntimeError):
    """A function was called in the wrong context, or strategies were mixed or nested."""


class CollectiveError(MpistratError, RuntimeError):
    """The ranks disagree about a call, or a rank left while others wait for it."""

    _caused_elsewhere: bool = False
    """Whether an error on a different rank is the cause.

    That rank reports it, and this one prints nothing when the job ends.
    """


class CollectiveMismatchError(CollectiveError):
    """The ranks called different collectives, or the same one with different arguments."""


class _ShapeMismatchError(CollectiveMismatchError, ValueError):
    """The shapes of the ranks' arrays do not match. All ranks notice this before sending them."""


# Users see the name of the documented class.
_ShapeMismatchError.__name__ = _ShapeMismatchError.__qualname__ = CollectiveMismatchError.__name__


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not make the call within the time limit."""


# Old names, kept for the first programs that used mpistrat.
EpochError = CollectiveError
EpochMismatchError = CollectiveMismatchError
EpochTimeoutError = CollectiveTimeoutError


class ReplicaLostError(CollectiveError):
    """State of replicas was lost with their ranks, so an elastic strategy cannot continue."""


class ReplicaDriftError(CollectiveError):
    """The replicas of a variable differ although they should be equal.

    Unlike after other errors of collectives, the strategy stays usable: the ranks still agree on
    their calls, and may repair the variable or restore a checkpoint.
    """


class ScopeWarning(UserWarning):
    """A line in a program with several replicas probably lacks a scope or `Strategy.run`.

    Also the category for other mistakes that may lead to a wrong number. Each warning appears once
    per line of the program, and says what to write instead.
    """


class ReplicaDriftWarning(ScopeWarning):
    """A checkpoint was saved from variables whose replicas differ although they should be equal."""


class LaunchError(MpistratError, RuntimeError):
    """The launcher does not match MPI, or there are not enough devices for the ranks.

    Attributes
    ----------
    _is_reported_elsewhere : bool
        True if every task raises the same error by itself, on all tasks except the one that
        reports it.
    """

    _is_reported_elsewhere: bool = False


class DataError(MpistratError, ValueError):
    """A data file, field or shape does not match the others or the request."""

    _is_of_field: bool = False
    """Whether only one field cannot be read as examples, so that ``fields=None`` skips it."""


class OutOfRangeError(MpistratError, IndexError):
    """The iterator of a dataset has no more elements."""


class UnavailableError(MpistratError, ConnectionError):
    """A rank that the call needs is lost: a server with its variables, or every worker."""

    _is_reported_elsewhere: bool = False


class WorkerLostError(MpistratError, RuntimeError):
    """Two workers died while they ran a closure, which is therefore not run again."""


class CancelledError(MpistratError):
    """A closure was not run, because an earlier one failed or the coordinator was closed."""


class ClosureInputError(MpistratError):
    """The function of a per-worker dataset failed on a worker; its error is the cause."""


class CheckpointError(MpistratError, OSError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file is damaged."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The shapes or dtypes in a checkpoint differ from the shapes or dtypes in the program."""


class _UnmatchedPathsError(CheckpointMismatchError, AssertionError):
    """The paths in a checkpoint differ from the paths in the program that restored it."""


def warn_deprecated(name: str, remedy: str) -> None:
    """Warn that `name` is deprecated, at the line that called the deprecated function."""
    warnings.warn(f"{name} is deprecated. {remedy}", DeprecationWarning, stacklevel=3)
