"""Variables: mirrored, SyncOnRead, and plain ones outside every strategy."""

from mpistrat.variables.base import Variable, container_of
from mpistrat.variables.checks import can_cast
from mpistrat.variables.drift import check_replicas_agree, variables_to_compare
from mpistrat.variables.mirrored import MirroredVariable
from mpistrat.variables.sync_on_read import SyncOnReadVariable

__all__ = [
    "MirroredVariable",
    "SyncOnReadVariable",
    "Variable",
    "can_cast",
    "check_replicas_agree",
    "container_of",
    "variables_to_compare",
]
