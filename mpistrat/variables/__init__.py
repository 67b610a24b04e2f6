"""Variables: mirrored, SyncOnRead, and plain variables outside every strategy."""

from mpistrat.variables.drift import check_replicas_agree, variables_to_compare
from mpistrat.variables.kinds import MirroredVariable, SyncOnReadVariable, WrittenTogether
from mpistrat.variables.sharded import ShardedVariable
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import can_cast

__all__ = [
    "MirroredVariable",
    "ShardedVariable",
    "SyncOnReadVariable",
    "Variable",
    "WrittenTogether",
    "can_cast",
    "check_replicas_agree",
    "variables_to_compare",
]
