"""All our strategies pass the suite that we ship."""

import pytest

import mpistrat as ms
from mpistrat.testing import StrategyTests
from tests.fast_paths import OFF, WAYS, opened
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


class Repeated(StrategyTests):
    """Each test three times with one strategy, which may keep what the first time has found out."""

    way = OFF

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def kept(cls):
        with opened(cls.way) as cls.strategy_of_all:
            yield

    @pytest.fixture(autouse=True, params=range(3))
    def time(self, request):
        return request.param

    def make_strategy(self):
        return self.strategy_of_all


class TestWithoutFastPaths(Repeated):
    pass


class TestInMemory(Repeated):
    way = WAYS[0]


class TestBetweenNodes(Repeated):
    way = WAYS[1]


class TestByMessages(Repeated):
    way = WAYS[2]
