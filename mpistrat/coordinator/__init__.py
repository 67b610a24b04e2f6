"""Schedule function calls on workers, under `mpistrat.ParameterServerStrategy`."""

from mpistrat.coordinator.coordinator import ClusterCoordinator, RemoteValue
from mpistrat.coordinator.per_worker import (
    PerWorkerValues,
    experimental_get_current_worker_index,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
