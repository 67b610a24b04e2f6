"""Strategies, and the functions that ask which one is current."""

from mpistrat.strategies.base import Strategy
from mpistrat.strategies.current import (
    experimental_set_strategy,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.strategies.multi_step import MultiStepContext
from mpistrat.strategies.one_device import OneDeviceStrategy

__all__ = [
    "MPIStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
