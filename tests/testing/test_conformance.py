"""All our strategies pass the suite that we ship."""

import mpistrat as ms
from mpistrat.testing import StrategyTests


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
