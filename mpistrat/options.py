"""Options and enums of the public interface: reductions, runs, inputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias


class ReduceOp(enum.Enum):
    """Reduction that combines the values of several replicas into one.

    Examples
    --------
    >>> ms.ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    # Members are singletons. The hash of Enum is a Python call, and each collective needs several.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member that `op` is or names.

        Parameters
        ----------
        op : ReduceOp or str
            A member, or its name in upper or lower case.

        Returns
        -------
        ReduceOp
            The member.

        Raises
        ------
        ValueError
            If `op` is a string that names no member.
        TypeError
            If `op` is neither a string nor a `ReduceOp`.
        """
        if isinstance(op, cls):
            return op
        if isinstance(op, str):
            member = _REDUCTIONS.get(op.upper())
            if member is not None:
                return member
        known = ", ".join(f'"{name.lower()}"' for name in cls.__members__)
        if isinstance(op, str):
            raise ValueError(f"Unknown reduction {op!r}. Use one of {known}.")
        raise TypeError(
            f"The reduction must be one of the strings {known}, or a ReduceOp, not {op!r} of type "
            f"{type(op).__name__}."
        )


_REDUCTIONS = dict(ReduceOp.__members__)

ReduceOpLike: TypeAlias = (
    ReduceOp
    | Literal["SUM", "MEAN", "MIN", "MAX", "PROD"]
    | Literal["sum", "mean", "min", "max", "prod"]
)
"""A reduction, or its name."""


class VariableSynchronization(enum.Enum):
    """When the components of a distributed variable are combined.

    Examples
    --------
    >>> total = ms.Variable(0.0, synchronization=ms.VariableSynchronization.ON_READ)
    >>> total.trainable
    False
    """

    AUTO = "AUTO"
    """Let the strategy choose: the variable is mirrored."""
    NONE = "NONE"
    """Not supported: a variable of only one replica."""
    ON_WRITE = "ON_WRITE"
    """Mirrored: every write reaches every replica."""
    ON_READ = "ON_READ"
    """SyncOnRead: writes are local, and a read in cross-replica context aggregates them."""


class VariableAggregation(enum.Enum):
    """How the components of a distributed variable, or writes to it, become one value.

    Examples
    --------
    >>> with strategy.scope():
    ...     steps = ms.Variable(0, aggregation=ms.VariableAggregation.ONLY_FIRST_REPLICA)
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """The value of rank 0, on every rank."""


class CommunicationImplementation(enum.Enum):
    """Library or memory that transfers the data of a reduction.

    Examples
    --------
    >>> chosen = ms.CommunicationImplementation.MPI
    >>> options = ms.CommunicationOptions(implementation=chosen)
    """

    AUTO = "AUTO"
    """Let mpistrat choose."""
    MPI = "MPI"
    """The MPI library, directly on the memory of the array. For GPU memory mpistrat first tests
    that this works, and raises `ValueError` if it does not."""
    SHARED = "SHARED"
    """A shared-memory window within a node. Device arrays are copied to the host in parts."""
    STAGED = "STAGED"
    """Device arrays are copied to the host in parts and reduced there. Host arrays: like MPI."""
    NCCL = "NCCL"
    """NCCL. Each rank needs its own GPU, otherwise it raises `ValueError`. Host arrays: like
    AUTO."""


AUTOMATIC_BYTES_PER_PACK = 2**25
"""Size of a message of several arrays, for ``bytes_per_pack=0``."""


@dataclass(frozen=True)
class CommunicationOptions:
    """Options for the communication of a collective: message size, time limit, rounding.

    Raises
    ------
    ValueError, TypeError
        For a value outside the ranges below.

    Examples
    --------
    >>> options = ms.CommunicationOptions(timeout_seconds=60, deterministic=True)
    >>> strategy = ms.MPIStrategy(communication_options=options)
    >>> strategy.close()
    """

    bytes_per_pack: int = 0
    """Small arrays of one call are packed into messages of about this many bytes; 0 is
    automatic, which is 32 MiB."""
    timeout_seconds: float | None = None
    """How many seconds to wait for missing ranks. ``None``: the strategy's value, or
    else the setting ``MPISTRAT_TIMEOUT_S``. Other options of a call replace the strategy's."""
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    """Library or memory that transfers the data."""
    deterministic: bool = False
    """Whether the bits of a reduction depend only on the number of ranks and the values.

    For every op and dtype, each element is combined in a fixed tree in rank order. So the result
    does not depend on the run, the rank, packing, sizes or the placement of ranks on nodes. On one
    node shared memory keeps that order at no cost. Over several nodes it costs some speed, and
    `start_all_reduce` does the whole reduction before it returns. A NaN in the result has the bits
    of ``numpy.nan``."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """Dtype to which SUM and MEAN round floats before they send them: ``"float16"``,
    ``"bfloat16"``, or ``None`` for no rounding.

    float32, float64 and longdouble arrays are rounded to this dtype, added up in float32 in the
    order of `deterministic`, divided (MEAN), and rounded again. Results have the arrays' dtypes.
    float16 and bfloat16 arrays are sent unchanged; without this option they are sent as float32.
    Values beyond the range of float16 become inf on every rank, without a warning.

    The option does not change anything else, so a nest may mix dtypes: it does not apply to
    integers, bools and complex numbers, to `IndexedSlices`, or to MIN, MAX and PROD. As an option
    of the strategy it applies to `reduce`, `all_reduce`, `reduce_to`, `apply_gradients` and the
    pullbacks; variables, metrics and layers are never rounded."""

    def __hash__(self) -> int:
        # Options are cache keys in every call. If they differ at all, then mostly in this field.
        return self.bytes_per_pack

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int):
            raise TypeError(f"bytes_per_pack must be an integer, not {self.bytes_per_pack!r}.")
        if self.bytes_per_pack < 0:
            raise ValueError(
                "bytes_per_pack must be a number of bytes, or 0 for automatic, not "
                f"{self.bytes_per_pack}."
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, not {self.timeout_seconds}.")
        if not isinstance(self.implementation, CommunicationImplementation):
            raise TypeError(
                "implementation must be a CommunicationImplementation, "
                f"not {self.implementation!r}."
            )
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False, not {self.deterministic!r}.")
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                f'wire_dtype must be "float16", "bfloat16" or None, not {self.wire_dtype!r}.'
            )


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, kept for programs written for tf.distribute.

    Both fields control graph compilation there. They have no effect here.

    Examples
    --------
    >>> strategy.run(lambda: 1, options=ms.RunOptions()).values
    (1,)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False


class InputReplicationMode(enum.Enum):
    """How often a dataset function is called.

    Examples
    --------
    >>> ms.InputOptions().experimental_replication_mode.name
    'PER_WORKER'
    """

    PER_WORKER = "PER_WORKER"
    """The only mode that `Strategy.distribute_dataset` supports."""
    PER_REPLICA = "PER_REPLICA"
    """`Strategy.distribute_dataset` raises NotImplementedError."""


@dataclass(frozen=True)
class InputOptions:
    """Options for the distribution of a dataset.

    Examples
    --------
    >>> batches = ms.data.Dataset.range(8).batch(4)
    >>> options = ms.InputOptions(experimental_prefetch_to_device=False)
    >>> distributed = strategy.distribute_dataset(batches, options)
    """

    experimental_prefetch_to_device: bool = True
    """Whether batches are copied to the replica's device or stay in host memory."""
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """A dataset function is called once per replica, whatever the mode."""
    experimental_place_dataset_on_device: bool = False
    """Not supported: datasets are stored in host memory."""

    def __post_init__(self) -> None:
        if self.experimental_place_dataset_on_device:
            raise NotImplementedError(
                "experimental_place_dataset_on_device=True is not supported: datasets live "
                "in host memory, and batches are fetched to the device "
                "(experimental_prefetch_to_device=True)."
            )


class AutoShardPolicy(enum.Enum):
    """How a distributed dataset is divided among ranks.

    Examples
    --------
    >>> policy = ms.data.AutoShardPolicy.FILE
    >>> dataset = ms.data.Dataset.range(8).batch(4).with_options(auto_shard_policy=policy)
    """

    AUTO = "AUTO"
    """DATA, because an HDF5 file that all ranks share is the normal case."""
    DATA = "DATA"
    """Each global batch is split into contiguous parts, in rank order."""
    FILE = "FILE"
    """File f goes to rank f mod N; batches have at most ceil(B / N) examples."""
    OFF = "OFF"
    """Each rank iterates over every example, in batches of ceil(B / N)."""


@dataclass(frozen=True)
class InputContext:
    """The argument of a function passed to `distribute_datasets_from_function`.

    Examples
    --------
    >>> context = ms.InputContext(num_input_pipelines=4, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(128)
    32
    """

    num_input_pipelines: int = 1
    """Number of datasets that are created in total: one per replica."""
    input_pipeline_id: int = 0
    """Number of this dataset: the replica, which is the rank if each rank has one."""
    num_replicas_in_sync: int = 1
    """Number of replicas in total."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica. Local.

        Parameters
        ----------
        global_batch_size : int
            Number of examples per step over all replicas.

        Returns
        -------
        int
            Number of examples per step and replica.

        Raises
        ------
        ValueError
            If `global_batch_size` is not divisible by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The global batch size {global_batch_size!r} is not divisible by the number of "
                f"replicas in sync, {self.num_replicas_in_sync}. Choose a multiple of it."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The argument of a function passed to `distribute_values_from_function`.

    Examples
    --------
    >>> ms.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    """Number of this replica; equal to the rank if each rank has one replica."""
    num_replicas_in_sync: int = 1
    """Number of replicas in total."""
