"""The programming model of tf.distribute for NumPy and CuPy programs on MPI clusters.

Importing this package does not start MPI and imports neither h5py nor cupy. It does set
`sys.excepthook`, so that an uncaught exception on one rank ends the whole job, and adds a handler
to the `mpistrat` logger, which is silent if the program has its own.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

if not _sys.platform.startswith("linux"):
    raise ImportError(
        f"mpistrat runs on Linux, and this is {_sys.platform}: it needs Linux's shared memory, "
        "futexes and /proc. Use it in a Linux container, in a virtual machine or in WSL 2."
    )

from mpistrat import errors
from mpistrat import pytorch as _pytorch
from mpistrat.failures.connect import open_last_channel as _open_last_channel
from mpistrat.failures.logs import install as _install_logs
from mpistrat.failures.shutdown import install as _install_shutdown
from mpistrat.mpi.world import abort_world as _abort_world
from mpistrat.options import (
    CommunicationImplementation,
    CommunicationOptions,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import (
    CentralStorageStrategy,
    MPIStrategy,
    MultiStepContext,
    OneDeviceStrategy,
    ParameterServerStrategyV1,
    Strategy,
    StrategyExtended,
    experimental_set_strategy,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.strategies import print_on_chief as print
from mpistrat.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from mpistrat.variables import ShardedVariable, Variable
from mpistrat.version import __version__

__all__ = [
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedValues",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MPIStrategy",
    "Mirrored",
    "MultiStepContext",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ParameterServerStrategyV1",
    "PerReplica",
    "PerReplicaState",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "coordinator",
    "data",
    "errors",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "gradients",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "layers",
    "metrics",
    "optimizers",
    "partitioners",
    "print",
    "testing",
]


# Thousands of ranks read these files at the same moment, so modules are imported when first needed.
_ROOMS = (
    *("coordinator", "data", "gradients", "layers", "metrics", "optimizers", "partitioners"),
    "testing",
)
_LATER = {
    "Checkpoint": "mpistrat.checkpoint",
    "CheckpointManager": "mpistrat.checkpoint",
    "ParameterServerStrategy": "mpistrat.coordinator.coordinator",
    "PerReplicaState": "mpistrat.checkpoint",
    "PreemptionCheckpointHandler": "mpistrat.checkpoint",
    "latest_checkpoint": "mpistrat.checkpoint",
}
"""Names that are imported when first needed, and their modules."""

if _typing.TYPE_CHECKING:
    from mpistrat import (
        coordinator,
        data,
        gradients,
        layers,
        metrics,
        optimizers,
        partitioners,
        testing,
    )
    from mpistrat.checkpoint import (
        Checkpoint,
        CheckpointManager,
        PerReplicaState,
        PreemptionCheckpointHandler,
        latest_checkpoint,
    )
    from mpistrat.parameter_server.server_strategy import ParameterServerStrategy
else:  # so that type checkers still report missing names as errors

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return _importlib.import_module(f"mpistrat.{name}")
        if name in _LATER:
            found = globals()[name] = getattr(_importlib.import_module(_LATER[name]), name)
            return found
        from mpistrat.system.migration import missing_name

        raise missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted(__all__)


def _tensor_library() -> object:
    from mpistrat.torch.states import TorchTensors

    return TorchTensors()


def _keras_states() -> _typing.Callable[[object], object]:
    from mpistrat.keras.requirements import check_backend

    check_backend()
    from mpistrat.keras.states import state_of

    return state_of


_pytorch.register_tensors(_tensor_library)
_pytorch.register_states("keras", _keras_states)
_install_shutdown(_open_last_channel, _abort_world)
_install_logs()
