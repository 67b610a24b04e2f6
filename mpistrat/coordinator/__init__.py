"""Closures that a chief schedules on workers, under `mpistrat.ParameterServerStrategy`."""

from mpistrat.coordinator.coordinator import ClusterCoordinator
from mpistrat.coordinator.per_worker import (
    PerWorkerValues,
    experimental_get_current_worker_index,
)
from mpistrat.coordinator.remote_value import RemoteValue

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
