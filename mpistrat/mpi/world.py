"""MPI world: starts MPI, and maps ranks to nodes; the only user of ``COMM_WORLD``.

A strategy works on a private duplicate of the user's communicator, so that messages of the user
cannot match ours. All strategies on one communicator share the duplicate, and so have one common
sequence of collectives. After a `CollectiveError` the next strategy gets a new duplicate.
"""

from __future__ import annotations

import ctypes
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import Launcher, check_torchrun, find_launcher, is_one_of_several
from mpistrat.mpi.mpiexec import mpiexec_program
from mpistrat.mpi.survival import failed_ranks
from mpistrat.system.cpu import cores_of_mask, mask_of_cores, own_cores

if TYPE_CHECKING:
    from mpi4py import MPI

_HEAD_START_S = 2.0
"""How long other tasks wait for the report of task 0, if each task fails by itself."""

_keyval: int | None = None
"""MPI's key for our attribute, which the first world creates."""


@dataclass(frozen=True)
class World:
    """Facts that a rank knows about its job."""

    comm: MPI.Intracomm
    """Communicator that the user passed, or COMM_WORLD."""
    rank: int
    size: int
    local_rank: int
    """Number of this rank among the ranks of its node."""
    hosts: tuple[str, ...]
    """One name per node, in the order of the lowest rank on each."""
    launcher: Launcher
    node_of_rank: tuple[int, ...]
    """For each rank, the index of its node in `hosts`."""
    num_cores: int
    """Number of cores that the ranks of this node may use together."""

    @property
    def ranks_of_node(self) -> tuple[int, ...]:
        """Ranks on the node of this rank."""
        own = self.node_of_rank[self.rank]
        return tuple(rank for rank, node in enumerate(self.node_of_rank) if node == own)


def communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Start MPI if needed, check `comm`, and return it; ``None`` stands for COMM_WORLD."""
    launcher = find_launcher()
    if not is_started():
        _start(launcher)
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise LaunchError(
            "MPI was finalized in this process, and cannot be started again. Create the strategy, "
            "and use it, before the program calls MPI.Finalize()."
        )
    _check_launch(launcher)
    if comm is None:
        check_torchrun(MPI.COMM_WORLD.size)
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"comm must be an mpi4py intracommunicator or None, not {type(comm).__name__}."
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "comm is COMM_NULL: this rank is not part of the communicator. "
            "Create the strategy only on ranks that are."
        )
    return comm


def open_world(comm: MPI.Intracomm | None) -> World:
    """Return the world of `comm`, and start MPI if needed. **Collective** over `comm`."""
    comm = communicator(comm)
    launcher = find_launcher()
    nodes: _Nodes = attached(comm, "node map", lambda: _map_nodes(comm, launcher))
    return World(
        comm,
        comm.rank,
        comm.size,
        nodes.local_rank,
        nodes.hosts,
        launcher,
        nodes.node_of_rank,
        nodes.num_cores,
    )


def started_world() -> MPI.Intracomm | None:
    """Return COMM_WORLD if this process is one rank of several, else ``None``."""
    # This starts MPI only in a process that a launcher has started as one of several ranks.
    if "mpi4py.MPI" not in sys.modules:
        if not is_one_of_several():
            return None
        try:
            _start(find_launcher())
        except (LaunchError, ImportError, RuntimeError):  # RuntimeError: there is no MPI library
            return None
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return None
    return MPI.COMM_WORLD


def running_world() -> MPI.Intracomm | None:
    """Return what `started_world` returns, ``None`` too if MPI has not been started."""
    return started_world() if is_started() else None


def is_started() -> bool:
    """Return whether this process has started MPI. This does not start it."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return MPI.Is_initialized()


def _start(launcher: Launcher) -> None:
    """Start MPI, or raise `LaunchError` if MPI has no connection to the launcher."""
    # Without a connection, MPICH would end the process inside MPI_Init, and Open MPI would wait
    # there. So load the library first, and ask for its version.
    if launcher.is_inherited:
        load_library()
        if launcher.has_only_pmix or library_version().startswith("MPICH"):
            raise LaunchError(
                f"This process inherited the environment of an MPI rank ({launcher.title} started "
                f"{launcher.num_tasks}) but is not a rank, so MPI cannot start here. A rank "
                f"probably started it, with subprocess or multiprocessing. {launcher.remedy('')}"
            )
    if launcher.has_only_pmix:
        file = load_library()  # this file, or a library that it is linked to, has the function
        if library_version().startswith("MPICH") and not hasattr(ctypes.CDLL(file), "PMIx_Init"):
            raise _launch_error(
                launcher, "which this MPI library cannot join, because it does not speak PMIx"
            )
    with warnings.catch_warnings():
        # mpi4py warns of some wrong launchers. `_check_launch` raises for these and others.
        warnings.simplefilter("ignore", RuntimeWarning)
        from mpi4py import MPI

        if MPI.Is_initialized():
            return
        from mpi4py import rc

        if rc.threads:
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
        else:
            MPI.Init()


def load_library() -> str:
    """Load the MPI library without starting MPI, and return mpi4py's file that is linked to it."""
    from mpi4py import rc

    # Importing mpi4py.MPI starts MPI unless `rc.initialize` is false. It registers the end of MPI
    # only if `rc.finalize` is true; None means the same value as `initialize`.
    initialize, finalize = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, initialize if finalize is None else finalize
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = initialize, finalize
    return MPI.__file__


def _check_launch(launcher: Launcher) -> None:
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    if size >= launcher.num_tasks:
        return
    if MPI.Comm.Get_parent() != MPI.COMM_NULL:  # MPI_Comm_spawn created this world
        return
    world = "a world of one rank" if size == 1 else f"a world of {size} ranks"
    raise _launch_error(launcher, f"but MPI sees {world}: every task would be a separate job")


def _launch_error(launcher: Launcher, what: str) -> LaunchError:
    """Return the error that each task raises by itself, and that only task 0 reports."""
    library = library_version().partition(",")[0]
    where = " in this step" if launcher.name == "slurm" else ""
    flag = f" The flag was --mpi={launcher.protocol}." if launcher.protocol else ""
    remedy = launcher.remedy(library)
    if launcher.name in ("openmpi", "mpich", "intel") and (program := mpiexec_program()):
        remedy += f" The first one here is {program}."
    error = LaunchError(
        f"{launcher.title} started {launcher.num_tasks} tasks{where}, {what}.{flag} {remedy}"
    )
    if launcher.task != 0:
        error._is_reported_elsewhere = True
        # A launcher may end all tasks as soon as one has failed, but task 0 has to report first.
        time.sleep(_HEAD_START_S)
    return error


@dataclass(frozen=True)
class _Nodes:
    """Nodes on which the ranks of a communicator run."""

    local_rank: int
    hosts: tuple[str, ...]
    node_of_rank: tuple[int, ...]
    num_cores: int


def _map_nodes(comm: MPI.Intracomm, launcher: Launcher) -> _Nodes:
    from mpi4py import MPI

    # Prefer Slurm's name of the node, because MPI libraries have mistaken one node for several.
    mark: Any = launcher.node_name or ranks_of_node(comm)[0]
    name = launcher.node_name or MPI.Get_processor_name()
    facts = comm.allgather((mark, name, mask_of_cores(own_cores())))
    marks = [each for each, _, _ in facts]
    names: dict[Any, str] = {}
    for each, host, _ in facts:
        names.setdefault(each, host)
    numbers = {each: number for number, each in enumerate(names)}
    # Take the union, because a bound rank may use only some of the cores of the node.
    cores = 0
    for each, _, mask in facts:
        if each == mark:
            cores |= mask
    return _Nodes(
        local_rank=marks[: comm.rank].count(mark),
        hosts=tuple(names.values()),
        node_of_rank=tuple(numbers[each] for each in marks),
        num_cores=len(cores_of_mask(cores)),
    )


def ranks_of_node(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of `comm` on this rank's node, according to MPI. **Collective** once."""
    from mpi4py import MPI

    def find() -> list[int]:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        ranks = _ranks_in(node, comm)
        node.Free()
        return ranks

    found: list[int] = attached(comm, "ranks of node", find)
    return found


def attached(
    comm: MPI.Intracomm,
    key: str,
    make: Callable[[], Any],
    is_valid: Callable[[Any], bool] = lambda known: True,
) -> Any:
    """Return the object attached to `comm` under `key`, and create it if there is no valid one."""
    attributes = _attributes(comm)
    if key not in attributes or not is_valid(attributes[key]):
        # If `make` is collective, all ranks must have the same objects attached. So they attach and
        # forget them in the same calls.
        attributes[key] = make()
    return attributes[key]


def is_attached(comm: MPI.Intracomm, key: str) -> bool:
    """Return whether an object is attached to `comm` under `key`."""
    return key in _attributes(comm)


def forget_attached(comm: MPI.Intracomm, key: str) -> Callable[[], None]:
    """Return a function that detaches the object under `key`, even after `comm` is freed."""
    attributes = _attributes(comm)
    return lambda: attributes.pop(key, None)


def _attributes(comm: MPI.Intracomm) -> dict[str, Any]:
    """Return the objects attached to `comm`."""
    # MPI's attribute caching holds them (MPI 4.1, section 7.7), so they live as long as `comm`.
    from mpi4py import MPI

    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval()
    attributes: Any = comm.Get_attr(_keyval)
    if attributes is None:
        attributes = {}
        comm.Set_attr(_keyval, attributes)
    found: dict[str, Any] = attributes
    return found


def library_version() -> str:
    """Return name and version of the MPI library in one line. This loads the library."""
    return " ".join(library_details().split("\n")[0].split())


def library_details() -> str:
    """Return the full version text of the MPI library. This loads the library."""
    from mpi4py import MPI

    return MPI.Get_library_version().rstrip("\0")


def thread_level() -> str:
    """Return the thread level of MPI, such as ``"multiple"``. MPI must have been started."""
    from mpi4py import MPI

    names = ("single", "funneled", "serialized", "multiple")
    levels = [getattr(MPI, f"THREAD_{name.upper()}") for name in names]
    return names[levels.index(MPI.Query_thread())]


def largest_tag() -> int:
    """Return the largest tag that a message may have."""
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the rank in COMM_WORLD of each rank of `comm`."""
    from mpi4py import MPI

    return _ranks_in(comm, MPI.COMM_WORLD)


def _ranks_in(comm: MPI.Comm, larger: MPI.Comm) -> list[int]:
    """Return the rank in `larger` of each rank of `comm`."""
    # This is local: MPI translates groups without a message.
    own, all_ranks = comm.Get_group(), larger.Get_group()
    ranks = own.Translate_ranks(None, all_ranks)
    own.Free()
    all_ranks.Free()
    return list(ranks)


def world_rank() -> int:
    """Return the rank of this process in the job, from its launcher if MPI is not started."""
    if is_started():
        from mpi4py import MPI

        if not MPI.Is_finalized():
            return MPI.COMM_WORLD.rank
    launcher = find_launcher()
    return 0 if launcher.is_inherited else launcher.task


def world_size() -> int:
    """Return the number of ranks in COMM_WORLD. This starts MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def failed_world_ranks() -> list[int]:
    """Return the ranks of COMM_WORLD that MPI knows to be dead. Local."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return []
    return failed_ranks(MPI.COMM_WORLD)


def abort_world(exit_code: int) -> None:
    """End every process of the job."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(exit_code)
