"""Checkpoints: plain HDF5 files that any number of ranks can write and read."""

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.directory import latest_checkpoint
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.checkpoint.preemption import PreemptionCheckpointHandler
from mpistrat.checkpoint.restore import RestoreStatus

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "RestoreStatus",
    "latest_checkpoint",
]
