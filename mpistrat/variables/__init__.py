"""Variables: mirrored, SyncOnRead, and plain ones outside every strategy."""

from mpistrat.variables.central import CentralVariable, take_node_memory
from mpistrat.variables.divided import DividedElements
from mpistrat.variables.drift import check_replicas_agree, variables_to_compare
from mpistrat.variables.flat_sharded import FlatShardedVariable
from mpistrat.variables.kinds import MirroredVariable, SyncOnReadVariable
from mpistrat.variables.replicated import ReplicatedOnRead
from mpistrat.variables.sharded import ShardedVariable
from mpistrat.variables.split import SplitVariable
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import can_cast

__all__ = [
    "CentralVariable",
    "DividedElements",
    "FlatShardedVariable",
    "MirroredVariable",
    "ReplicatedOnRead",
    "ShardedVariable",
    "SplitVariable",
    "SyncOnReadVariable",
    "Variable",
    "can_cast",
    "check_replicas_agree",
    "take_node_memory",
    "variables_to_compare",
]
