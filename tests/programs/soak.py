"""Random collectives with random delays for a long time, which must all be right.

``python -m mpistrat.testing -n 4 --limit 700 -- tests/programs/soak.py --seconds 600``
shows that checks raise no false alarm on this machine and MPI library.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.data import Dataset
from mpistrat.metrics import Mean
from mpistrat.optimizers import SGD
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.testing.conformance import refused
from mpistrat.testing.faults import inject
from mpistrat.variables import Variable

_JITTER_S = 0.001
_PAUSE_S = 0.1
_PAUSES_PER_OPERATION = 0.005
_OPERATIONS_PER_QUESTION = 50


class Soak:
    """Random operations, the same ones on every rank, at different times. **Collective**.

    Parameters
    ----------
    strategy : MPIStrategy
    seed : int
        Must agree over ranks.
    """

    def __init__(self, strategy: MPIStrategy, seed: int) -> None:
        self.strategy = strategy
        self.size = strategy.num_replicas_in_sync
        self.rank = strategy.extended._collectives.rank
        self.total = self.size * (self.size - 1) // 2
        self.common = random.Random(seed)
        self.own = random.Random(f"{seed} on rank {self.rank}")
        self.num_operations = 0
        with strategy.scope():
            self.weight = Variable(np.zeros(5), name="weight", aggregation=VariableAggregation.SUM)
            self.seen = Variable(
                0.0,
                name="seen",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            self.loss = Mean(name="loss")
            self.optimizer = SGD(0.5, momentum=0.5)
        self._operations: list[Callable[[], None]] = [
            self.reduce,
            self.reduce_nothing_but_errors,
            self.gather,
            self.all_reduce,
            self.start_all_reduces,
            self.merge_call,
            self.write_a_variable,
            self.read_on_demand,
            self.measure,
            self.optimize,
            self.fail_and_go_on,
            self.read_data,
            self.begin_again,
        ]

    def run_for(self, seconds: float) -> None:
        """Do operations for some time.

        Raises
        ------
        AssertionError
            If a result is wrong.
        """
        end = time.monotonic() + seconds
        while not self._all_hear(time.monotonic() > end):
            for _ in range(_OPERATIONS_PER_QUESTION):
                if self.own.random() < _PAUSES_PER_OPERATION:
                    time.sleep(self.own.uniform(0, _PAUSE_S))
                self.common.choice(self._operations)()
                self.num_operations += 1
        self.strategy.extended.assert_replicas_agree({"weight": self.weight})

    def _all_hear(self, is_over: bool) -> bool:
        collectives = self.strategy.extended._collectives
        return bool(collectives.broadcast_json(is_over, kind="Soak"))

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.common.choice([0, 1, 3, 40]) for _ in range(self.common.randrange(3)))

    def _in_replica(self, fn: Callable[[Any], Any]) -> Any:
        (result,) = self.strategy.experimental_local_results(
            self.strategy.run(lambda: fn(get_replica_context()))
        )
        return result

    def reduce(self) -> None:
        shape, dtype = self._shape(), self.common.choice(["i4", "i8", "f2", "f4", "f8", "c16"])
        op, expected = self.common.choice([("sum", self.total), ("mean", self.total / self.size)])
        result = self.strategy.reduce(op, np.full(shape, self.rank, dtype))
        assert result.shape == shape
        np.testing.assert_allclose(result, expected, rtol=1e-3)

    def reduce_nothing_but_errors(self) -> None:
        with refused(ValueError, "axis 7"):
            self.strategy.reduce("sum", np.ones(3), axis=7)
        with refused(ValueError, "Unknown reduction"):
            self.strategy.reduce("median", 1)

    def gather(self) -> None:
        lengths = [self.common.randrange(4) for _ in range(self.size)]
        gathered = self.strategy.gather(np.full((lengths[self.rank], 2), self.rank), 0)
        assert gathered[:, 1].tolist() == np.repeat(range(self.size), lengths).tolist()

    def all_reduce(self) -> None:
        nest = {"a": np.full(self._shape(), self.rank, np.float32), "b": [self.rank]}
        result = self._in_replica(lambda replica: replica.all_reduce("sum", nest))
        assert (result["a"] == self.total).all()
        assert result["b"] == [self.total]

    def start_all_reduces(self) -> None:
        def fn(replica: Any) -> Any:
            begun = [replica.start_all_reduce("max", self.rank + each) for each in range(3)]
            self.own.shuffle(begun)
            return sum(each.wait() for each in begun)

        assert self._in_replica(fn) == 3 * self.size

    def merge_call(self) -> None:
        def merge(strategy: Any, value: Any) -> Any:
            return strategy.extended.reduce_to("sum", value, "cpu:0")

        result = self._in_replica(lambda replica: replica.merge_call(merge, args=(self.rank,)))
        assert result == self.total

    def write_a_variable(self) -> None:
        before = self.weight.numpy()
        self.strategy.run(lambda: self.weight.assign_add(np.full(5, self.rank + 1.0)))
        np.testing.assert_allclose(self.weight.numpy(), before + self.total + self.size)
        self.weight.assign(np.zeros(5))

    def read_on_demand(self) -> None:
        self.strategy.run(lambda: self.seen.assign(float(self.rank)))
        assert self.seen.numpy() == self.total

    def measure(self) -> None:
        self.loss.reset_state()
        self.strategy.run(lambda: self.loss.update_state(float(self.rank)))
        np.testing.assert_allclose(self.loss.result(), self.total / self.size)

    def optimize(self) -> None:
        gradient = np.full(5, float(self.rank))
        self.strategy.run(lambda: self.optimizer.apply_gradients([(gradient, self.weight)]))

    def fail_and_go_on(self) -> None:
        def fn() -> None:
            raise KeyError("on purpose")

        with refused(KeyError, "on purpose"):
            self.strategy.run(fn)

    def read_data(self) -> None:
        number = self.common.randrange(1, 12)
        dataset = Dataset.from_arrays(np.arange(number)).shuffle(seed=number).batch(4)
        batches = self.strategy.experimental_distribute_dataset(dataset)
        sums = [self.strategy.reduce("sum", batch, axis=0) for batch in batches]
        assert sum(sums) == number * (number - 1) // 2

    def begin_again(self) -> None:
        if self.common.random() < 0.1:
            other = MPIStrategy(device="cpu")
            assert other.reduce("min", self.rank) == 0


def main() -> int:
    """Run the soak that the command line asks for. **Collective**."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    strategy = MPIStrategy(device="cpu")
    channel = strategy.extended._collectives.channel
    soak = Soak(strategy, arguments.seed)
    inject(f"jitter:{_JITTER_S}", seed=arguments.seed, strategy=strategy)
    soak.run_for(arguments.seconds)
    if soak.rank == 0:
        print(
            f"{soak.num_operations} operations, {channel.ledger.sequence} collectives on "
            f"{soak.size} ranks in {arguments.seconds:g} s: every result was right"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
