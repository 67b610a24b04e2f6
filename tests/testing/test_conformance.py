"""All our strategies pass the suite that we ship."""

import mpistrat as ms
from mpistrat.testing import StrategyTests
from tests.replica_groups import DIVISORS


class TestMPIStrategy(StrategyTests):
    def make_strategy(self):
        return ms.MPIStrategy()


class TestOneDeviceStrategy(StrategyTests):
    def make_strategy(self):
        return ms.OneDeviceStrategy()


class TestDefaultStrategy(StrategyTests):
    distributes = False

    def make_strategy(self):
        return ms.get_strategy()


class TestReplicasOverAllRanks(StrategyTests):
    def make_strategy(self):
        return ms.MPIStrategy(ranks_per_replica=DIVISORS[-1])


class TestReplicasOverSomeRanks(StrategyTests):
    def make_strategy(self):
        return ms.MPIStrategy(ranks_per_replica=DIVISORS[len(DIVISORS) // 2])
