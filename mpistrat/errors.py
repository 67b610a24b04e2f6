"""Exceptions of mpistrat, and warnings for names that tf.distribute has deprecated."""

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
    """A call in the wrong context, or strategies that are mixed or nested."""


class CollectiveError(MpistratError, RuntimeError):
    """The ranks disagree, or a rank left while others wait for it."""

    _caused_elsewhere: bool = False
    """True where another rank's own error is the cause.

    That rank reports it, and this one stays quiet when the job ends.
    """


class CollectiveMismatchError(CollectiveError):
    """The ranks met in different collectives, or in one with other arguments."""


class _ShapeMismatchError(CollectiveMismatchError, ValueError):
    """The arrays of the ranks do not fit each other, which all ranks know before they move."""


# Users see the class that the documentation names.
_ShapeMismatchError.__name__ = _ShapeMismatchError.__qualname__ = CollectiveMismatchError.__name__


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not come within the time given."""


# The names of mpistrat's first programs.
EpochError = CollectiveError
EpochMismatchError = CollectiveMismatchError
EpochTimeoutError = CollectiveTimeoutError


class ReplicaLostError(CollectiveError):
    """State of replicas was lost with their ranks, so an elastic strategy cannot continue."""


class ReplicaDriftError(CollectiveError):
    """The replicas of a variable differ where they should be equal.

    Unlike after other errors of collectives, the strategy stays usable: the ranks do agree on what
    they call, and may repair the variable or restore a checkpoint.
    """


class ScopeWarning(UserWarning):
    """A line of a program of several replicas that probably lacks a scope or `Strategy.run`.

    Also the category of other slips that may give a wrong number. Each is given once per place in
    the program, and says what to write instead.
    """


class ReplicaDriftWarning(ScopeWarning):
    """A checkpoint was saved of variables whose replicas differ where they should be equal."""


class LaunchError(MpistratError, RuntimeError):
    """The launcher and MPI do not fit each other, or the ranks do not fit the devices.

    Attributes
    ----------
    _is_reported_elsewhere : bool
        True on all tasks but one where each meets the same error alone.
    """

    _is_reported_elsewhere: bool = False


class DataError(MpistratError, ValueError):
    """A data file, field or shape that does not fit."""

    _is_of_field: bool = False
    """Whether a field alone cannot be read as examples, so that ``fields=None`` leaves it out."""


class OutOfRangeError(MpistratError, IndexError):
    """The iterator of a data set has no further element."""


class UnavailableError(MpistratError, ConnectionError):
    """A rank that the call needs is lost: a server with its variables, or every worker."""

    _is_reported_elsewhere: bool = False


class WorkerLostError(MpistratError, RuntimeError):
    """Two workers died while they ran a closure, which is therefore not run again."""


class CancelledError(MpistratError):
    """A closure was not run: another one has failed before, or the coordinator was closed."""


class ClosureInputError(MpistratError):
    """The function of a per-worker data set has failed on a worker; its error is the cause."""


class CheckpointError(MpistratError, OSError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file is damaged."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The shapes or dtypes of a checkpoint differ from those of the program."""


class _UnmatchedPathsError(CheckpointMismatchError, AssertionError):
    """The paths of a checkpoint and of the program that restored it are not the same."""


def warn_deprecated(name: str, remedy: str) -> None:
    """Warn the caller of the function that calls this that `name` is deprecated."""
    warnings.warn(f"{name} is deprecated. {remedy}", DeprecationWarning, stacklevel=3)
