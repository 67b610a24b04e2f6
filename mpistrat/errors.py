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
    """A function was called in the wrong context, or strategies were mixed or nested.

    Cause: for example `Strategy.run` inside a replica function, or a value of another strategy.
    Remedy: move the call to the context that the message names.
    """


class CollectiveError(MpistratError, RuntimeError):
    """The ranks disagree about a call, or a rank left while others wait for it.

    Cause: a rank raised, ended or was killed before this call. Remedy: read the first error of that
    rank; exit code 9 or 137 usually means that it was out of memory.
    """

    _caused_elsewhere: bool = False
    """Whether an error on a different rank is the cause.

    That rank reports it, and this one prints nothing when the job ends.
    """


class CollectiveMismatchError(CollectiveError):
    """The ranks called different collectives, or the same one with different arguments.

    Cause: mostly a collective under ``if rank == 0``, or a loop that ends earlier on one rank.
    Remedy: let all ranks make the calls that the table in the message lists, in the same order.
    """


class _ShapeMismatchError(CollectiveMismatchError, ValueError):
    """The shapes of the ranks' arrays do not match. All ranks notice this before sending them."""


# Users see the name of the documented class.
_ShapeMismatchError.__name__ = _ShapeMismatchError.__qualname__ = CollectiveMismatchError.__name__


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not make the call within the time limit.

    Cause: a rank waits for something else, or computes for longer than the limit. Remedy: look at
    the line that the message names for it, or raise ``MPISTRAT_TIMEOUT_S``.
    """


# Old names, kept for the first programs that used mpistrat.
EpochError = CollectiveError
EpochMismatchError = CollectiveMismatchError
EpochTimeoutError = CollectiveTimeoutError


class ReplicaLostError(CollectiveError):
    """State of replicas was lost with their ranks, so an elastic strategy cannot continue.

    Cause: several ranks died together, or per-replica values had no copy. Remedy: restart the job;
    it continues from its newest checkpoint.
    """


class ReplicaDriftError(CollectiveError):
    """The replicas of a variable differ although they should be equal.

    Cause: for example an assignment on one rank only, or random numbers that differ. Remedy: assign
    on all ranks, or restore a checkpoint.

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

    Cause: for example an ``mpiexec`` of a different MPI library, or more ranks than GPUs. Remedy:
    start with ``mpistrat run``, and check the machine with ``mpistrat doctor``.

    Attributes
    ----------
    _is_reported_elsewhere : bool
        True if every task raises the same error by itself, on all tasks except the one that
        reports it.
    """

    _is_reported_elsewhere: bool = False


class DataError(MpistratError, ValueError):
    """A data file, field or shape does not match the others or the request.

    Cause: a wrong path or name of a field, or files whose examples differ. Remedy: compare with
    ``mpistrat inspect FILE``, and correct the file or the argument that the message names.
    """

    _is_of_field: bool = False
    """Whether only one field cannot be read as examples, so that ``fields=None`` skips it."""


class OutOfRangeError(MpistratError, IndexError):
    """The iterator of a dataset has no more elements.

    Cause: more calls of ``get_next`` than batches. Remedy: loop with ``for``, or add ``repeat()``.
    """


class UnavailableError(MpistratError, ConnectionError):
    """A rank that the call needs is lost: a server with its variables, or every worker.

    Cause: its process died. Remedy: restart the job from its newest checkpoint.
    """

    _is_reported_elsewhere: bool = False


class WorkerLostError(MpistratError, RuntimeError):
    """Two workers died while they ran a closure, which is therefore not run again.

    Cause: mostly the closure itself, for example by its memory. Remedy: run it alone with the same
    arguments.
    """


class CancelledError(MpistratError):
    """A closure was not run, because an earlier one failed or the coordinator was closed.

    Cause: the error of the earlier closure, which ``join`` raises. Remedy: correct it, and schedule
    the cancelled closures again.
    """


class ClosureInputError(MpistratError):
    """The function of a per-worker dataset failed on a worker; its error is the cause.

    Cause: the exception in ``__cause__``. Remedy: correct the function, and create the dataset
    again.
    """


class CheckpointError(MpistratError, OSError):
    """A checkpoint cannot be written or read.

    Cause: a missing folder or file, a full disk, or a lack of permission. Remedy: correct what the
    message names; the previous file is unchanged.
    """


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file is damaged.

    Cause: a disk error, or a copy that was cut short. Remedy: restore an earlier file; ``mpistrat
    verify`` says which ones are intact.
    """


class CheckpointMismatchError(CheckpointError, ValueError):
    """The shapes or dtypes in a checkpoint differ from the shapes or dtypes in the program.

    Cause: the model was changed after the save. Remedy: create the variables as they were, or
    restore only those that match.
    """


class _UnmatchedPathsError(CheckpointMismatchError, AssertionError):
    """The paths in a checkpoint differ from the paths in the program that restored it."""


def warn_deprecated(name: str, remedy: str) -> None:
    """Warn that `name` is deprecated, at the line that called the deprecated function."""
    warnings.warn(f"{name} is deprecated. {remedy}", DeprecationWarning, stacklevel=3)
