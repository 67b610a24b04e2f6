"""Options and enums of the public interface: reductions, runs, inputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias


class ReduceOp(enum.Enum):
    """How values of several replicas become one.

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

    # Members are singletons. The hash of Enum is a call of Python, and every call needs some.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member that `op` is or names, in any case.

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
        known = ", ".join(cls.__members__)
        if isinstance(op, str):
            raise ValueError(f"Unknown reduction {op!r}. Use one of {known}.")
        raise TypeError(
            f"The reduction must be a ReduceOp or one of the strings {known}, "
            f"not {op!r} of type {type(op).__name__}."
        )


_REDUCTIONS = dict(ReduceOp.__members__)

ReduceOpLike: TypeAlias = (
    ReduceOp
    | Literal["SUM", "MEAN", "MIN", "MAX", "PROD"]
    | Literal["sum", "mean", "min", "max", "prod"]
)
"""A reduction, or its name."""


class VariableSynchronization(enum.Enum):
    """When the components of a distributed variable are brought together.

    Examples
    --------
    >>> total = ms.Variable(0.0, synchronization=ms.VariableSynchronization.ON_READ)
    >>> total.trainable
    False
    """

    AUTO = "AUTO"
    """Let the strategy choose: the variable is mirrored."""
    NONE = "NONE"
    """Not supported: a variable of one replica alone."""
    ON_WRITE = "ON_WRITE"
    """Mirrored: every write reaches every replica."""
    ON_READ = "ON_READ"
    """SyncOnRead: writes are local, a cross-replica read aggregates."""


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
    """Which code moves the bytes of a reduction.

    Examples
    --------
    >>> chosen = ms.CommunicationImplementation.MPI
    >>> options = ms.CommunicationOptions(implementation=chosen)
    """

    AUTO = "AUTO"
    """Let mpistrat choose."""
    MPI = "MPI"
    """The MPI library, on the memory of the array itself; on that of a GPU where it is proved to
    work, else it raises `ValueError`."""
    SHARED = "SHARED"
    """A shared-memory window within a node. Device arrays are copied to the host in parts."""
    STAGED = "STAGED"
    """Copies of device arrays in parts, and the reduction on the host. Host arrays: as MPI."""
    NCCL = "NCCL"
    """NCCL, between GPUs of which each rank has its own; else it raises `ValueError`. Host arrays:
    as AUTO."""


AUTOMATIC_BYTES_PER_PACK = 2**25
"""Size of a message of several arrays, for ``bytes_per_pack=0``."""


@dataclass(frozen=True)
class CommunicationOptions:
    """How a collective communicates.

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
    """Small arrays of one call travel together in messages of about this many bytes; 0 is
    automatic, which is 32 MiB."""
    timeout_seconds: float | None = None
    """How long to wait for missing ranks. ``None``: what the strategy was made with, or
    else the setting ``MPISTRAT_TIMEOUT_S``."""
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    """Which code moves the bytes."""
    deterministic: bool = False
    """Whether the bits of a reduction depend on the number of ranks and the values alone.

    For every op and dtype: each element is combined in a fixed tree in rank order, so neither
    the run, the rank, packing, sizes nor the placement of ranks on nodes show in the result. On
    one node shared memory keeps that order at no cost. Over several nodes it costs some speed,
    and `start_all_reduce` does the whole reduction before it returns. NaN come out with the bits
    of ``numpy.nan``."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """What floats are rounded to before they travel in SUM and MEAN: ``"float16"``,
    ``"bfloat16"``, or ``None`` for no rounding.

    float32, float64 and longdouble arrays are rounded to it, added up in float32 in the order of
    `deterministic`, divided (MEAN), and rounded again; results have the arrays' dtypes.
    float16 and bfloat16 arrays travel as they are, where they else travel as float32. What
    exceeds the range of float16 becomes inf on every rank, without a warning.

    Everything else travels as without it, so a nest may mix dtypes: integers, bools and complex
    numbers, `IndexedSlices`, and what MIN, MAX and PROD reduce. As an option of the strategy it
    holds for `reduce`, `all_reduce`, `reduce_to`, `apply_gradients` and the pullbacks; variables,
    metrics and layers never lose a bit to it."""

    def __hash__(self) -> int:
        # Options are keys of caches in every call; most differ in what stands here, if at all.
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

    Both fields steer graph compilation there and are no-ops by nature here.

    Examples
    --------
    >>> strategy.run(lambda: 1, options=ms.RunOptions()).values
    (1,)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False


class InputReplicationMode(enum.Enum):
    """How often a data set function is called.

    Examples
    --------
    >>> ms.InputOptions().experimental_replication_mode.name
    'PER_WORKER'
    """

    PER_WORKER = "PER_WORKER"
    """Once per rank, which owns one replica."""
    PER_REPLICA = "PER_REPLICA"
    """Once per replica."""


@dataclass(frozen=True)
class InputOptions:
    """How a data set is distributed.

    Examples
    --------
    >>> batches = ms.data.Dataset.range(8).batch(4)
    >>> options = ms.InputOptions(experimental_prefetch_to_device=False)
    >>> distributed = strategy.experimental_distribute_dataset(batches, options)
    """

    experimental_prefetch_to_device: bool = True
    """Whether batches arrive on the replica's device or stay in host memory."""
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    """How often a data set function is called."""
    experimental_place_dataset_on_device: bool = False
    """Not supported: data sets live in host memory."""

    def __post_init__(self) -> None:
        if self.experimental_place_dataset_on_device:
            raise NotImplementedError(
                "experimental_place_dataset_on_device=True is not supported: data sets live "
                "in host memory, and batches are fetched to the device "
                "(experimental_prefetch_to_device=True)."
            )


class AutoShardPolicy(enum.Enum):
    """How a distributed data set is divided among ranks.

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
    """The argument of a function given to `distribute_datasets_from_function`.

    Examples
    --------
    >>> context = ms.InputContext(num_input_pipelines=4, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(128)
    32
    """

    num_input_pipelines: int = 1
    """How many data sets are made in all: one per rank."""
    input_pipeline_id: int = 0
    """The number of this one: the rank."""
    num_replicas_in_sync: int = 1
    """How many replicas there are in all."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica. Local.

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
    """The argument of a function given to `experimental_distribute_values_from_function`.

    Examples
    --------
    >>> ms.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    """The number of this replica: the rank."""
    num_replicas_in_sync: int = 1
    """How many replicas there are in all."""
