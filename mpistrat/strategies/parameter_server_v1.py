"""ParameterServerStrategyV1: a name of tf.distribute that refuses whatever is done with it."""

from __future__ import annotations

from typing import Any, NoReturn


class _Refusing:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        self()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "ParameterServerStrategyV1 belongs to TensorFlow's Estimators, which mpistrat has not. "
            "Its second version is ParameterServerStrategy(num_ps=0, variable_partitioner=None, "
            "comm=None) with coordinator.ClusterCoordinator(strategy)."
        )

    def __repr__(self) -> str:
        return "<ParameterServerStrategyV1, which is not here>"


ParameterServerStrategyV1 = _Refusing()
"""The first version of TensorFlow's parameter server. Its attributes and calls raise
`NotImplementedError`, which names the second version."""
