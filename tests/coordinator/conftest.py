"""Parameter-server jobs inside a test: the chief runs the body, and the others serve."""

import pytest

import mpistrat as ms
from mpistrat.testing.launch import rank_and_size

_SIZE = (rank_and_size() or (0, 1))[1]


@pytest.fixture(params=sorted({0, max(0, _SIZE - 2)}), ids=lambda num_ps: f"{num_ps} servers")
def num_ps(request):
    """Return a number of servers: none, and as many as leave one worker."""
    return request.param


@pytest.fixture
def job(num_ps):
    """Return a function that makes a strategy, has `setup` make variables, and runs `body`."""

    def run(body, setup=None, **arguments):
        strategy = ms.ParameterServerStrategy(num_ps, **arguments)
        with strategy.scope():
            made = setup() if setup is not None else ()
        if strategy.cluster_resolver.task_type != "chief":
            strategy.serve()
            return
        try:
            body(ms.coordinator.ClusterCoordinator(strategy), *made)
        finally:
            strategy.close()

    return run
