"""Loops in which servers and workers serve the chief, until the chief ends them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mpistrat.coordinator.closures import run_closure
from mpistrat.coordinator.dispatcher import Dispatcher
from mpistrat.coordinator.per_worker import WorkerData
from mpistrat.errors import CollectiveError
from mpistrat.failures import losses
from mpistrat.parameter_server.server_job import Roles, ServerJob
from mpistrat.parameter_server.store import Lane

if TYPE_CHECKING:
    from mpistrat.comm.messages import Message

_CLOSE, _END, _FAIL = 1, 2, 3
"""Messages of the chief on the control lane: finish; all have finished; the chief has failed."""

_RANKS = struct.Struct("<i")

_FLUSH_S = 1.0


def dispatcher_of(job: ServerJob) -> Dispatcher:
    """Return the dispatcher of the chief.

    The first call waits until the other ranks serve, and creates it: **Collective** then.
    """
    job.begin()
    pump = job.pump
    known = getattr(pump, "__self__", None)
    return known if isinstance(known, Dispatcher) else Dispatcher(job)


def serve(job: ServerJob) -> list[int]:
    """Work for the chief until it ends, and return the ranks that are lost."""
    task_type, _ = job.role_of(job.group.rank)
    if task_type == "ps":
        return _serve_variables(job)
    return _serve_closures(job)


def _serve_variables(job: ServerJob) -> list[int]:
    """Answer requests for variables."""
    messages, client, back_off = job.messages, job.client, job.back_off
    while True:
        message = messages.poll()
        if message is None:
            _rest(job)
            continue
        back_off.reset()
        if message.lane == Lane.REQUEST:
            client.answer(message.source, message.number, message.body, message.buffers)
        elif message.lane == Lane.CONTROL:
            # Workers that have not finished yet may still ask for variables, so a server serves
            # until _END.
            if message.kind == _CLOSE:
                messages.send(0, Lane.CONTROL, _CLOSE)
                continue
            return _leave(job, message)


def _serve_closures(job: ServerJob) -> list[int]:
    """Run closures."""
    messages, data = job.messages, WorkerData()
    num_received = 0
    while True:
        message = _next(job)
        if message.lane == Lane.CLOSURE:
            num_received += 1
            # Start no further closure if the chief has closed or failed in the meantime.
            control = messages.poll(0, Lane.CONTROL)
            if control is None:
                _run(job, data, message)
                continue
            message = control
        if message.lane != Lane.CONTROL:
            continue  # an answer that no call is waiting for any more
        if message.kind == _CLOSE:
            while num_received < message.number:  # drop closures that were sent before
                num_received += _next(job).lane == Lane.CLOSURE
            messages.send(0, Lane.CONTROL, _CLOSE)
            continue
        return _leave(job, message)


def _next(job: ServerJob) -> Message:
    """Wait for the next message from the chief, and return it."""
    messages = job.messages
    job.back_off.reset()
    while True:
        message = messages.poll(0)
        if message is not None:
            return message
        _rest(job)


def _rest(job: ServerJob) -> None:
    if 0 in job.messages.lost:
        job.leave_without_chief()
    job.check_peers()
    job.back_off.rest()


def _run(job: ServerJob, data: WorkerData, message: Message) -> None:
    """Run a closure, and send its outcome before the next one begins."""
    messages = job.messages
    outcome = run_closure(job, data, message.body, message.buffers)
    messages.send(0, Lane.RESULT, outcome.kind, message.number, outcome.body, outcome.buffers)
    # Wait until the result has left this process, because the next closure may kill it.
    while not messages.is_idle():
        messages.flush(0.1)
        job.check_peers()


def _leave(job: ServerJob, message: Message) -> list[int]:
    """Return the lost ranks that the chief names, or raise an error if the chief has failed."""
    job.messages.flush(_FLUSH_S)
    lost = [rank for (rank,) in _RANKS.iter_unpack(bytes(message.body))]
    if message.kind == _FAIL:
        _raise_failure(job, lost)
    return lost


def _raise_failure(job: ServerJob, lost: Sequence[int]) -> NoReturn:
    """Leave because the chief has failed. The chief reports its failure itself."""
    if lost:
        losses.leave_out(job.group.channel, lost)
    error = CollectiveError("The chief has failed, so there is nothing more to do here.")
    error._caused_elsewhere = True
    error._is_reported_elsewhere = True  # type: ignore[attr-defined]
    raise error


def end(job: ServerJob) -> list[int]:
    """Make all other ranks return from `serve`, and return the lost ones."""
    dispatcher = dispatcher_of(job)
    messages = job.messages

    def close(rank: int, number: int) -> None:
        messages.send(rank, Lane.CONTROL, _CLOSE, number)

    dispatcher.end_workers(close)
    servers = [rank for rank in job.holders if rank]
    for rank in servers:
        close(rank, 0)
    job.back_off.reset()
    while not {*servers} <= dispatcher.ended | messages.lost:
        if not dispatcher.pump():
            job.check_peers()
            job.back_off.rest()
    lost = sorted(messages.lost)
    _tell_all(job, _END, lost)
    # A lost rank never receives messages that were sent to it before, so limit the wait.
    messages.flush(None if not lost else _FLUSH_S)
    return lost


def fail(job: ServerJob) -> None:
    """Make all other ranks leave, because the chief has failed."""
    lost = sorted(job.messages.lost)
    _tell_all(job, _FAIL, lost)
    job.messages.flush(_FLUSH_S)
    if lost:
        losses.leave_out(job.group.channel, lost)


def _tell_all(job: ServerJob, kind: int, lost: Sequence[int]) -> None:
    body = b"".join(map(_RANKS.pack, lost))
    for rank in range(1, job.group.size):
        if rank not in lost:
            job.messages.send(rank, Lane.CONTROL, kind, 0, body)


ServerJob.roles = Roles(serve, end, fail)
