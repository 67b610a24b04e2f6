"""Process groups of torch.distributed over MPI: their creation, use and end."""

from __future__ import annotations

import inspect
import logging
import sys
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from mpistrat import context
from mpistrat.agreement.channel import Channel
from mpistrat.errors import (
    CollectiveError,
    LaunchError,
)
from mpistrat.mpi.world import thread_level
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.torch import tensor_futures
from mpistrat.torch.collectives import Operations
from mpistrat.torch.launching import (
    Options,
    backend_of,
    check_devices,
    check_place,
    job_communicator,
)
from mpistrat.torch.new_groups import wait_for_members
from mpistrat.torch.point_to_point import Messages
from mpistrat.torch.tensors import described, is_on_host
from mpistrat.torch.works import GroupQueue

_logger = logging.getLogger("mpistrat")

_NUM_TAGS = 32767
"""The largest tag that every MPI library supports."""


class Group(Operations, Messages):
    """A group of ranks with its own communicator, strategy and queue.

    A base for a class whose next base is a class of torch. At its end it frees `comm`, a
    communicator of only the members.
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, timeout: timedelta, options: Options
    ) -> None:
        torchs: Any = super().__init__
        torchs(comm.rank, comm.size)
        self._comm = comm
        self._messages = comm.Dup()
        self._strategy = MPIStrategy(comm, "cpu", options.communication_options)
        self._collectives = context.collectives_of(self._strategy)
        self._collectives.name_of_close = "torch.destroy_process_group"
        self.set_timeout(timeout)
        tensor_futures.warm_up()
        self._queue = GroupQueue(f"mpistrat-group-{name}", self._collectives.channel)
        self._name = name
        _open_groups[name] = self

    def _channel(self) -> Channel:
        return self._collectives.channel

    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self._collectives.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._collectives.size

    getRank, getSize = rank, size

    def name(self) -> str:
        """Return the name of the backend."""
        return "mpistrat"

    getBackendName = _get_backend_name = name

    @property
    def supports_coalescing(self) -> bool:
        """Whether batches of messages use `_start_coalescing`."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether torch may create groups by splitting this one."""
        return False

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Do nothing: operations are issued one by one."""

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        """Return a work that is done once all earlier operations are."""
        opts = dist.AllreduceOptions()
        return self.issue("torch.end_coalescing", lambda call: None, [], opts)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return once all ranks have called it, or raise an error that names those that are late.

        `wait_all_ranks` changes nothing: the error always names all of them.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            # 0 would mean the limit of the group.
            opts.timeout = max(timeout, timedelta(milliseconds=1))
        self.barrier(opts).wait()

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations of the group this rank has issued; messages do not count."""
        return self.num_issued

    getSequenceNumberForGroup = _get_sequence_number_for_group

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group counts from 0."""

    setSequenceNumberForGroup = _set_sequence_number_for_group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long operations wait for the other ranks."""
        self._collectives.channel.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the queue after the issued operations, and free the communicators. **Collective**."""
        if _open_groups.pop(self._name, None) is None:
            return
        self._queue.close()
        try:
            self._strategy.close()
        except CollectiveError as error:
            # The group ends in any case, and ranks may leave a program without destroying it.
            _logger.info("destroy_process_group of %s: %s", self._name, error)
            return
        self._collectives.channel.closed = RuntimeError(
            f"The process group {self._name!r} was destroyed. Make another one with new_group()."
        )
        # All ranks have taken part in the close above, so no rank sends in this group any more.
        self._free_messages()
        self._comm.Free()

    def abort(self) -> None:
        """End the group at once: operations that wait for other ranks raise. Local."""
        channel = self._collectives.channel
        if channel.closed is None:
            what, reported = "The process group was aborted", "abort of the process group"
            channel.leave_alone(what, reported, is_in_round=not self._queue.is_idle())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} rank {self.rank()} of {self.size()}>"


class MpiProcessGroup(Group, dist.ProcessGroup):
    """A group for only CPU tensors, which replaces torch's own group."""

    _desc = "undefined"
    _bound: torch.device | None = None
    _store: Any = None

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        if device.type != "cpu":
            raise RuntimeError(
                f"The mpistrat backend moves CPU tensors, and this group has no backend for "
                f"{device.type}."
            )
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def _register_backend(self, *_: Any) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The program's description of the group."""
        return self._desc

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._desc

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that the program has bound to the group."""
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound = device

    def get_group_store(self) -> Any:
        """Return the store that the members used at the rendezvous."""
        return self._store

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Raise: only new_group creates groups."""
        raise NotImplementedError("The mpistrat backend has no split_group. Use dist.new_group.")


class MpiBackend(Group, c10d.Backend):
    """CPU backend of a torch group in which tensors of other devices have a different backend.

    Torch calls it through its dispatcher, and forwards only `wait` and `get_future` of its works.
    """

    allreduce_sparse = Group.allreduce

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Raise: torch does not forward which rank sent the message."""
        raise NotImplementedError(
            "torch.recv: a group with backends of several devices cannot tell from whom a message "
            "came. Name the source, or receive in a group for CPU tensors alone: "
            'torch.distributed.new_group(backend="mpistrat").'
        )


class CheckedBackend(MpiBackend):
    """A CPU backend that also lets ranks agree before the other device's backend runs."""

    inner: Any = None
    """The backend of the device, such as torch's ProcessGroupNCCL."""
    _batch: list[Any] | None = None
    """Works on the host since `start_coalescing`."""
    supports_coalescing = True  # NCCL needs it if two ranks send to each other

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Issue all operations up to `end_coalescing` as one, on the device."""
        self._batch = []
        self.inner._start_coalescing()

    def end_coalescing(self, device: torch.device | None = None) -> Any:
        """Return a work that is done once all these operations are."""
        batch, self._batch = self._batch, None
        work = self.inner._end_coalescing()
        if work is not None and not batch:
            return work
        opts = dist.AllreduceOptions()
        return self.issue(
            "torch.end_coalescing", lambda call: [each.wait() for each in batch or ()], [], opts
        )

    def shutdown(self) -> None:
        """End both backends."""
        super().shutdown()
        self.inner.shutdown()

    def abort(self) -> None:
        """Abort both backends."""
        super().abort()
        self.inner.abort()


def _inputs(*arguments: Any) -> list[object]:
    """Return the input of each rank: a tensor, a list of tensors, or a list of such lists."""
    own = arguments[-2]
    tensors = [own] if isinstance(own, torch.Tensor) else own
    return [*map(described, tensors[0] if isinstance(tensors[0], list) else tensors)]


def _reduction(*arguments: Any) -> list[object]:
    op = arguments[-1].reduceOp
    return [getattr(op, "op", op).name, *_inputs(*arguments)]


def _rooted(*arguments: Any) -> list[object]:
    return [f"rank {arguments[-1].rootRank}", *_inputs(*arguments)]


_AGREED: dict[str, tuple[str, Callable[..., list[object]]]] = {
    "allreduce": ("all_reduce", _reduction),
    "allreduce_coalesced": ("all_reduce_coalesced", _reduction),
    "reduce": ("reduce", lambda own, opts: [*_reduction(own, opts), f"rank {opts.rootRank}"]),
    "broadcast": ("broadcast", _rooted),
    "gather": ("gather", _rooted),
    "scatter": ("scatter", lambda own, _, opts: _rooted(own, opts)),
    "allgather": ("all_gather", lambda outputs, *_: _inputs(outputs, None)),
    "all_gather_single": ("all_gather_into_tensor", _inputs),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", _inputs),
    "allgather_coalesced": ("all_gather_coalesced", _inputs),
    "reduce_scatter": ("reduce_scatter", _reduction),
    "reduce_scatter_single": ("reduce_scatter_tensor", _reduction),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", _reduction),
    "alltoall": ("all_to_all", lambda _, own, *__: [described(own[0])[0]]),
    "all_to_all_single": ("all_to_all_single", lambda _, own, *__: [described(own)[0]]),
}
"""Operations of both backends: torch's name, and the arguments that ranks compare."""


def _checked(method: str) -> Callable[..., Any]:
    """Return a method that agrees and then delegates, if the tensors are on the device."""
    of_host = getattr(MpiBackend, method)
    name, compared = _AGREED.get(method, ("", None))

    def operation(self: CheckedBackend, *args: Any) -> Any:
        if _lies_on_host(args):
            work = of_host(self, *args)
            if self._batch is not None:
                self._batch.append(work)
            return work
        if compared is not None:
            opts = dist.BroadcastOptions()
            opts.asyncOp = False  # NCCL uses the stream of the calling thread
            # Before the call of NCCL: if the ranks disagree there, the device waits without an
            # error.
            details = compared(*args)
            self.issue(f"torch.{name}", lambda call: call.agree(*details), [], opts).wait()
        return getattr(self.inner, method)(*args)

    return operation


for _method in (*_AGREED, "send", "recv"):
    setattr(CheckedBackend, _method, _checked(_method))


def _lies_on_host(arguments: Sequence[Any]) -> bool:
    """Return whether the first tensor in nested lists is on the host, or there is none."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return is_on_host(each)
        if isinstance(each, list) and each and not _lies_on_host(each):
            return False
    return True


def _hide_from_dynamo() -> None:
    """Let torch.compile leave the methods of groups alone.

    DDP calls them from C++ inside a compiled forward pass, and Dynamo cannot trace a group.
    """
    # As torch.compiler.disable does, which would import half of torch: 2 s at the first import.
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before torch 2.7
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for owner in (Operations, Messages, Group, MpiProcessGroup, MpiBackend, CheckedBackend):
        for each in vars(owner).values():
            function = getattr(each, "fget", each)
            if inspect.isfunction(function):
                frames.set_code_exec_strategy(function.__code__, skip)


_hide_from_dynamo()


def create_group(opts: Any, pg_options: Any) -> Group:
    """Create a group for torch. **Collective** over its members."""
    backends = _backends_by_device()
    check_devices(backends)
    if thread_level() != "multiple":
        raise LaunchError(
            f"MPI was started with the thread level {thread_level()}, but groups work on their own "
            "threads. Leave mpi4py.rc.thread_level at multiple."
        )
    options = pg_options if isinstance(pg_options, Options) else Options()
    identity = _communicator(opts), opts.group_id, opts.timeout, options
    if len(backends) == 1:
        # Torch's flight recorder needs a backend in C++. mpistrat has its own recorder.
        recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add("mpistrat")
        group = MpiProcessGroup(*identity)
        group._store = opts.store
        return group
    if set(backends.values()) != {"mpistrat"}:
        return MpiBackend(*identity)
    checked = CheckedBackend(*identity)
    (device,) = set(backends) - {"cpu"}
    inner = dist.Backend._plugins[dist.Backend.default_device_backend_map[device].upper()]
    checked.inner = inner.creator_fn(opts, None if pg_options is options else pg_options)
    return checked


def _backends_by_device() -> dict[str, str]:
    """Return the backends of the group that torch is creating."""
    # Torch does not pass the other devices of a group to the function that creates one backend.
    frame = sys._getframe(1).f_back
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, distributed_c10d.BackendConfig):
            return dict(config.get_device_backend_map())
        frame = frame.f_back
    return {"cpu": "mpistrat"}


def _communicator(opts: Any) -> MPI.Intracomm:
    """Return a new communicator of the members. **Collective** over them."""
    job = job_communicator()
    # Torch passes no list for the group of all ranks.
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    check_place(ranks, opts.group_rank, opts.group_size)
    wait_for_members(opts.store, opts.group_id, ranks, ranks[opts.group_rank], _limit_s(opts))
    whole = job.Get_group()
    members = whole.Incl(ranks)
    # Only the members take part. The tag keeps groups apart that are created at the same time
    # (MPI_Comm_create_group); Python's hash of a string would differ between the ranks.
    comm = job.Create_group(members, zlib.crc32(opts.group_id.encode()) % _NUM_TAGS)
    members.Free()
    whole.Free()
    return comm


def _limit_s(opts: Any) -> float:
    """Return how long to wait for members: by default as long as the world group waits."""
    limit_s: float = opts.timeout.total_seconds()
    if opts.timeout == distributed_c10d.default_pg_timeout and dist.is_initialized():
        world = getattr(backend_of(dist.group.WORLD), "_collectives", None)
        known = None if world is None else world.channel.timeout_s
        limit_s = limit_s if known is None else min(limit_s, known)
    return limit_s


_open_groups: dict[str, Group] = {}
"""Groups that Python has created; Torch's C++ code holds no reference to them."""


def _end_queues() -> None:
    """Stop all queue threads, so that none is inside MPI or Python when the interpreter ends."""
    for group in list(_open_groups.values()):
        group._queue.abandon(group.abort)


at(Phase.BEFORE_LAST_ROUND, _end_queues)
