"""What the functions that make data on each rank are told about their place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InputContext", "ValueContext"]


@dataclass(frozen=True)
class InputContext:
    """The argument of a function given to `distribute_datasets_from_function`."""

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
    """The argument of a function given to `experimental_distribute_values_from_function`."""

    replica_id_in_sync_group: int = 0
    """The number of this replica: the rank."""
    num_replicas_in_sync: int = 1
    """How many replicas there are in all."""
