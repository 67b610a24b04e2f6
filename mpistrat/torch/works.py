"""Works, which operations return, and the queue in which a group runs its operations."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from mpistrat.agreement.channel import Channel
from mpistrat.errors import CollectiveTimeoutError
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.system.callsite import Place, format_place, on_behalf_of
from mpistrat.torch import tensor_futures
from mpistrat.torch.tensors import is_on_host

_logger = logging.getLogger("mpistrat")

_SHORT_BYTES = 2**20
"""Up to this size, an operation that all ranks have reached is short enough to wait for."""
_LOOK_NS = 50_000
"""How long to wait for the other ranks: a thread switch takes longer."""
_BYTES_PER_NS = 5
"""About how many bytes ranks reduce in memory that they share."""
_LONGEST_LOOK_NS = 10_000_000
"""A program is not kept from computing any longer than this by a rank that is late."""

_ENGINE = os.path.join("torch", "autograd", "graph.py")

_PATIENCE_S = 1.0
"""How long the end of the program waits for the thread."""


class Work(dist.Work):
    """An issued operation, and its outcome.

    Parameters
    ----------
    kind : str
        The operation, for errors.
    outputs : list of torch.Tensor
        The tensors that it writes to.
    place : Place
        The line that issued it.
    """

    def __init__(self, kind: str, outputs: list[Any], place: Place) -> None:
        super().__init__()
        self.kind, self.outputs, self.place = kind, outputs, place
        self.error: BaseException | None = None
        self.is_done = False
        self._is_asked = False
        """Whether the program waits for the outcome."""
        self._future: torch.futures.Future[Any] | None = None
        self._unset: list[torch.futures.Future[Any]] = []

    def note_asked(self) -> None:
        """Remember that the program waits for the outcome."""
        self._is_asked = True

    def synchronize(self) -> None:
        """Call `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self.is_done

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return its error, if it has one."""
        self.note_asked()
        return self.error

    def unseen_error(self) -> BaseException | None:
        """Return its error, unless the program asks for it."""
        return None if self._is_asked else self.error

    def result(self) -> list[Any]:
        """Return the tensors that it wrote to, once it is done."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that it writes to."""
        self.note_asked()
        if self._future is None:
            is_list = bool(self.outputs) and isinstance(self.outputs[0], torch.Tensor)
            is_list = is_list and _is_called_by_engine(sys._getframe(1))
            if is_list and self.is_done and self.error is None:
                self._future = tensor_futures.done(self.outputs)
                return self._future
            begun: torch.futures.Future[Any] = torch.futures.Future()
            # The C++ code that waits for a future sees only an error in a callback as an error.
            ended = begun.then(self._outcome)
            self._future = tensor_futures.once_done(ended, self.outputs) if is_list else ended
            self._unset.append(begun)
            # After the line before: the thread that ends this sets `is_done` before it looks for a
            # future, so one of the two completes it.
            if self.is_done:
                self.complete_future()
        return self._future

    def _outcome(self, _: Any) -> list[Any]:
        if self.error is not None:
            raise self.error.with_traceback(None)  # C++ would print it
        return self.outputs

    def complete_future(self) -> None:
        """Complete the futures, if there are any, after `is_done` was set."""
        # Callbacks run here, without a lock. The thread that takes a future out of the list
        # completes it.
        while self._unset:
            with contextlib.suppress(IndexError):
                self._unset.pop().set_result(None)

    def __repr__(self) -> str:
        return f"{self.kind} at {format_place(self.place)}"


def _is_called_by_engine(frame: FrameType | None) -> bool:
    """Return whether C++ code has called from a backward pass, such as DDP and its own hooks.

    Callbacks of Python, which may call collectives themselves, need the thread of the queue, on
    which they run in the same order on all ranks. Those of TorchScript run on any thread.
    """
    return frame is None or frame.f_code.co_filename.endswith(_ENGINE)


class GroupWork(Work):
    """A collective of a group. It calls `operation` once."""

    def __init__(
        self, kind: str, operation: Callable[[], Any], outputs: list[Any], place: Place
    ) -> None:
        super().__init__(kind, outputs, place)
        self._operation: Callable[[], Any] | None = operation
        self._record: Any = None
        """Its event in torch's profile, and the future that ends it."""
        self._running = threading.Lock()
        # Held from the start until the operation is done: waiting means acquiring it.
        self._running.acquire()

    def show_in_profile(self) -> None:
        """Begin an event of torch's profiler, which ends with the operation."""
        record = torch.autograd.profiler.record_function(self.kind.replace("torch.", "mpistrat:"))
        record.__enter__()
        # The profiler sees its own thread alone, so a future reports the end.
        ended: torch.futures.Future[Any] = torch.futures.Future()
        record._call_end_callbacks_on_future(ended)
        self._record = record, ended

    def _end_record(self) -> None:
        record, self._record = self._record, None
        if torch.autograd.profiler._is_profiler_enabled:
            record[1].set_result(None)
        else:
            # The program has not waited, and its profile is gone. To end the event, or to free it,
            # would write into it.
            _late_records.append(record)

    def perform(self) -> None:
        """Run the operation on this thread, and complete the future."""
        operation, self._operation = self._operation, None
        assert operation is not None
        try:
            with on_behalf_of(self.place):
                operation()
        except BaseException as error:
            self.error = error
        if self._record is not None:
            self._end_record()  # before anybody who waits can end the profile
        self.is_done = True
        self._running.release()
        self.complete_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done, or raise its error; `CollectiveTimeoutError` after `timeout`."""
        self.note_asked()
        if not self.is_done:
            seconds = -1.0 if timeout is None else timeout.total_seconds()
            if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
                raise CollectiveTimeoutError(
                    f"{self.kind} was not done before the timeout of wait({seconds:g} s). It is "
                    "still under way."
                )
            # At once, for other threads that wait for the same operation.
            self._running.release()
        if self.error is not None:
            raise self.error
        return True


_late_records: list[Any] = []
"""Events that ended after the profile of which they are part."""


def _are_on_host(outputs: Sequence[Any]) -> bool:
    return all(
        _are_on_host(each) if isinstance(each, list) else is_on_host(each) for each in outputs
    )


class GroupQueue:
    """The operations of a group, one at a time and in the order in which they were issued.

    A synchronous operation runs on the thread that issues it if no operation is ahead of it, and so
    does a short one that all other ranks have reached. If this rank has only one core, so does a
    long one on the host: the thread of the queue would take the core from the program. All others
    run on that thread. An operation that a callback issues runs at once, because the callback may
    wait for it.

    Parameters
    ----------
    name : str
        Name of the thread.
    channel : Channel
        Channel of the group.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self._name = name
        self._channel = channel
        self._has_spare_core = cores_of_rank() > 1
        self._waiting: deque[GroupWork] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._busy: int | None = None
        """The thread that runs an operation."""
        self._under_way: GroupWork | None = None
        """The operation that the thread of the queue runs."""
        self._failed: GroupWork | None = None
        """The first operation that failed before the program asked for its outcome."""
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def add(self, work: GroupWork, is_async: bool, num_bytes: int) -> None:
        """Run `work`, which writes `num_bytes`, or queue it for the thread."""
        # This is a callback of the operation that this thread runs. If the callback's operation
        # were queued, the thread would wait for itself.
        if self._is_ending or self._busy == threading.get_ident():
            work.perform()
        elif (not is_async or self._is_at_hand(work, num_bytes)) and self._begin():
            try:
                work.perform()
            finally:
                if is_async:
                    self._note_failure(work)
                self._end()
            # An interrupt of the program, such as Ctrl-C. Where C++ waits for the work, as DDP
            # does, it would become a RuntimeError.
            if work.error is not None and not isinstance(work.error, Exception):
                work.note_asked()
                raise work.error
        else:
            with self._changed:
                self._waiting.append(work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()

    def _is_at_hand(self, work: GroupWork, num_bytes: int) -> bool:
        """Return whether running an operation here is faster than passing it to the thread."""
        limit_ns = _LOOK_NS
        if num_bytes > _SHORT_BYTES:
            if self._has_spare_core or not _are_on_host(work.outputs):
                return False
            # As long as the operation itself takes.
            limit_ns = min(num_bytes // _BYTES_PER_NS, _LONGEST_LOOK_NS)
        return self.is_idle() and self._channel.all_come(limit_ns)

    def _begin(self) -> bool:
        """Reserve the queue for one operation of this thread, if no operation is ahead of it."""
        with self._changed:
            if self._busy is not None or self._waiting:
                return False
            self._busy = threading.get_ident()
            return True

    def _end(self) -> None:
        with self._changed:
            self._busy = None
            if self._waiting or self._is_ending:  # waking the thread needlessly is expensive
                self._changed.notify_all()

    def _note_failure(self, work: GroupWork) -> None:
        if work.unseen_error() is not None and self._failed is None:
            self._failed = work

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._busy is not None or not self._waiting:
                    if self._is_ending and not self._waiting:
                        return
                    self._changed.wait()
                work = self._under_way = self._waiting.popleft()
                self._busy = threading.get_ident()
            # The program computes meanwhile, perhaps on the only core that this rank has.
            self._channel.transport.wait_busily(False)
            try:
                work.perform()
            finally:
                self._channel.transport.wait_busily(True)
                self._under_way = None
                self._note_failure(work)
                # Otherwise this frame would keep its tensors in memory until the next operation.
                del work
                self._end()

    def close(self) -> None:
        """End the thread after the queued operations."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None and self._busy != threading.get_ident():
            self._thread.join()
            self._thread = None

    def abandon(self, abort: Callable[[], object]) -> None:
        """End the thread although the program did not wait; `abort` operations that never end."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
            # `_end` wakes this thread, because `_is_ending` is set.
            is_done = self._changed.wait_for(self.is_idle, _PATIENCE_S)
            dropped = [self._under_way, *self._waiting]
            self._waiting.clear()
        if self._failed is not None and (error := self._failed.unseen_error()) is not None:
            _logger.warning("%s, for which nobody has waited, failed: %s", self._failed, error)
        for work in filter(None, () if is_done else dropped):
            _logger.warning(
                "The program ended while %s was under way: it is dropped. Call wait() on what an "
                "operation with async_op=True returns.",
                work,
            )
        # An operation that waits for ranks that never arrive would stay inside MPI while the
        # interpreter ends.
        if not is_done:
            abort()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def is_idle(self) -> bool:
        """Return whether no operation waits or is under way."""
        return self._busy is None and not self._waiting
