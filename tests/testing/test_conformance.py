"""All our strategies pass the suite that we ship."""

import pytest

import mpistrat as ms
from mpistrat.testing import StrategyTests
from tests.fast_paths import OFF, WAYS, opened
from tests.replica_groups import DIVISORS, NUM_RANKS


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


class Closed(StrategyTests):
    """With strategies that other tests would be warned of, if they stayed open."""

    def teardown_method(self):
        self.strategy.close()


class TestOneReplicaOnEachRank(Closed):
    def make_strategy(self):
        return ms.MPIStrategy(num_replicas=NUM_RANKS)


class TestSeveralReplicasOnEachRank(Closed):
    def make_strategy(self):
        return ms.MPIStrategy(num_replicas=2 * NUM_RANKS + 1)


class TestSeveralReplicasOnOneDevice(Closed):
    def make_strategy(self):
        return ms.OneDeviceStrategy(num_replicas=3)


class TestCentralStorage(Closed):
    def make_strategy(self):
        return ms.CentralStorageStrategy()


class TestShardedVariables(Closed):
    def make_strategy(self):
        partitioner = ms.partitioners.FixedShardsPartitioner(NUM_RANKS)
        return ms.MPIStrategy(variable_partitioner=partitioner)


class TestElasticJobs(Closed):
    """Where every third call is undone and repeated, and nothing is lost in between."""

    repeats = True

    @pytest.fixture(autouse=True, params=range(3))
    def repeated(self, request, job):
        job.repeated = lambda number: number % 3 == request.param
        super().setup_method()

    def setup_method(self):
        """Leave it to the fixture: the job comes first."""

    def make_strategy(self):
        return ms.MPIStrategy(elastic=True, num_replicas=NUM_RANKS + 1)

    def test_each_task_is_a_destination(self):
        # The job here renumbers the ranks: after that, a name with a GPU may mean a different task.
        names = self.strategy.extended.worker_devices
        if len({name.partition("/device:")[2] for name in names}) == 1:
            super().test_each_task_is_a_destination()


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
