"""How the suite runs, on its own and on several ranks.

``pytest`` alone runs everything in one process. Under mpiexec every rank runs the same tests
together, those marked ``launches`` or ``slurm`` aside, because they start their ranks themselves,
and those of pure code, which do not depend on the number.
Ranks other than 0 print only when a test fails there.
"""

import gc
import io
import logging
import sys

import pytest
from hypothesis import settings

import mpistrat.coordinator
import mpistrat.data  # noqa: F401 - Hypothesis draws numbers of what is loaded, alike on all ranks
from mpistrat.settings import settings as mpistrat_settings
from mpistrat.testing.launch import rank_and_size
from tests import devices
from tests.helpers import CountingTransport, outside_mpiexec

collect_ignore = outside_mpiexec(
    "test_arrays.py",
    "test_docs.py",
    "test_docstring_examples.py",
    "test_docstrings.py",
    "test_environment.py",
    "test_github.py",
    "test_hdf5.py",
    "test_import.py",
    "test_layers.py",
    "test_layout.py",
    "test_nests.py",
    "test_options.py",
    "test_packaging.py",
    "test_partitioners.py",
    "test_public_surface.py",
    "test_recipes.py",
    "test_settings.py",
    "test_sharding.py",
    "test_tf_names.py",
)

pytest_plugins = ["mpistrat.testing.plugin", "tests.elastic_jobs"]

# Every rank draws the same examples, and a slow machine fails no test.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.register_profile("quick", settings.get_profile("suite"), max_examples=25)

_WORLD = rank_and_size()
_STARTS_RANKS = ("launches", "slurm")
_ABOUT_HOSTS = pytest.StashKey[int]()
_speech = io.StringIO()


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "gpu"), default="cpu", help="of the strategies")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    devices.choose(config.option.device)
    settings.load_profile("quick" if "not thorough" in config.option.markexpr else "suite")
    if _WORLD is not None and _WORLD[0] > 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = _speech


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    is_slow = not mpistrat_settings().fast_paths
    firsts = {}
    for item in items:
        _narrow_quick(item)
        if item.get_closest_marker("thorough_product") is not None:
            _narrow_product(item, firsts)
        if is_slow and item.get_closest_marker("fast") is not None:
            item.add_marker(pytest.mark.skip(reason="counts what the fast paths save"))
    if config.option.device != "cpu":
        # Those of host memory, and those that count messages between hosts.
        config.stash[_ABOUT_HOSTS] = _leave_out(
            config,
            items,
            lambda item: item.get_closest_marker("host_memory") or "counts" in item.fixturenames,
        )
    if "campaign" not in config.option.markexpr:
        _leave_out(config, items, lambda item: item.get_closest_marker("campaign"))
    if _WORLD is not None:
        _leave_out(config, items, lambda item: any(map(item.get_closest_marker, _STARTS_RANKS)))


def _leave_out(config, items, is_left_out):
    """Deselect the tests for which `is_left_out` is true, and return their number."""
    kept, left_out = [], []
    for item in items:
        (left_out if is_left_out(item) else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    return len(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep modules and tests, which live as long as the session, from the garbage collector.

    Otherwise it takes half of the time of the collection, and later 1 s for each `gc.collect`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _let_torch_propagate()
        gc.freeze()
        gc.enable()


def _let_torch_propagate():
    """Let the 40 loggers of PyTorch hand their records to the root logger.

    pytest adds a handler to each logger that does not, six times in a test: 1 ms of each.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_terminal_summary(terminalreporter, config):
    if config.option.device == "cpu":
        return
    passed = terminalreporter.stats.get("passed", [])
    terminalreporter.write_line(
        f"{len(passed)} tests have passed with strategies on devices, and "
        f"{config.stash[_ABOUT_HOSTS]} about host memory were left out"
    )


def _narrow_product(item, firsts):
    """Mark a test as thorough where several of its parameters are not those of the first one."""
    ids = item.callspec._idlist
    first = firsts.setdefault(item.nodeid.partition("[")[0], ids)
    if sum(one != other for one, other in zip(ids, first, strict=True)) > 1:
        item.add_marker("thorough")


def _narrow_quick(item):
    """Take the marker `quick` from the parameters that it does not name, before -m reads it."""
    for marker in item.iter_markers("quick"):
        if marker.args and item.callspec.id not in marker.args:
            item.own_markers.remove(marker)


def pytest_unconfigure(config):
    if "FAILED" in _speech.getvalue() or "ERROR" in _speech.getvalue():
        print(f"\nrank {_WORLD[0]}:\n{_speech.getvalue()}", file=sys.stderr, flush=True)


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaves a strategy's context or an HDF5 file open."""
    yield
    if "mpistrat" in sys.modules:
        from mpistrat import context

        assert context.current() is None, f"the test left the {context.current().kind.value} open"
    if "h5py" in sys.modules:
        from h5py import h5f

        files = h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE)
        assert not files, f"the test left open: {[file.name for file in files]}"


@pytest.fixture
def strategy():
    """A strategy over all ranks; a fresh channel where the test before ended in disagreement."""
    import mpistrat as ms  # not before pytest has decided what to run

    return ms.MPIStrategy(device=devices.kind())


@pytest.fixture
def rank(strategy):
    return strategy.cluster_resolver.task_id


@pytest.fixture
def size(strategy):
    return strategy.num_replicas_in_sync


@pytest.fixture
def others(rank, size):
    """Ranks but the last, which plays the guilty one in tests of disagreement."""
    if size == 1:
        pytest.skip("needs two ranks that can disagree")
    return rank < size - 1


@pytest.fixture
def counts(strategy, monkeypatch):
    """How often each method of the strategy's transport has been called."""
    channel = strategy.extended._collectives.channel
    counting = CountingTransport(channel.transport)
    monkeypatch.setattr(channel, "transport", counting)
    return counting.counts


@pytest.fixture(autouse=True)
def warnings_once_more():
    """Give each warning once per test, as each test is a program of its own."""
    if "mpistrat.user_warnings" in sys.modules:
        sys.modules["mpistrat.user_warnings"]._given.clear()
