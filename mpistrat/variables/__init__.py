"""Variables: mirrored, SyncOnRead, and plain ones outside every strategy."""

from mpistrat.variables.base import Variable, container_of
from mpistrat.variables.mirrored import MirroredVariable
from mpistrat.variables.sync_on_read import SyncOnReadVariable

__all__ = ["MirroredVariable", "SyncOnReadVariable", "Variable", "container_of"]
