"""Checkpoints: plain HDF5 files that any number of ranks can write and read."""

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.checkpoint.preemption import PreemptionCheckpointHandler
from mpistrat.checkpoint.replica_state import PerReplicaState
from mpistrat.checkpoint.retention import latest_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "PerReplicaState",
    "PreemptionCheckpointHandler",
    "latest_checkpoint",
]
