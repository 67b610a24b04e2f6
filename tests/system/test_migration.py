"""Names of other packages: an alias, or what to write."""

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.system import migration

MODULES = {
    "mpistrat": ms,
    **{f"mpistrat.{name}": getattr(ms, name) for name in ("optimizers", "data", "metrics")},
}
HINTS = [(module, name) for module, hints in migration._HINTS.items() for name in hints]


@pytest.mark.parametrize(("module", "name"), HINTS)
def test_a_name_of_another_package_says_what_to_write(module, name):
    with pytest.raises(
        AttributeError, match=rf"{module}' has no attribute '{name}'. Write "
    ) as info:
        getattr(MODULES[module], name)
    assert not hasattr(MODULES[module], name)
    text = str(info.value)
    for path in re.findall(r"\bms((?:\.\w+)+)", text):
        found = ms
        for part in path.strip(".").split("."):
            found = getattr(found, part)
    for method in re.findall(r"\bstrategy\.(\w+)", text):
        assert hasattr(ms.Strategy, method), text
    for method in re.findall(r"get_replica_context\(\)\.(\w+)", text):
        assert hasattr(ms.ReplicaContext, method), text


def test_the_first_names_of_each_package_are_known():
    for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        with pytest.raises(AttributeError, match=r"ms\.MPIStrategy\(\).*mpiexec -n 4"):
            getattr(ms, name)
    with pytest.raises(AttributeError, match="which starts MPI"):
        ms.init()
    with pytest.raises(AttributeError, match=r"strategy\.close\(\)"):
        ms.shutdown()


@pytest.mark.parametrize("module", MODULES)
def test_other_names_are_missing_as_in_any_module(module):
    name = "nonsense"
    with pytest.raises(AttributeError, match=rf"'{module}' has no attribute '{name}'$") as info:
        getattr(MODULES[module], name)
    assert (info.value.name, info.value.obj) == ("nonsense", MODULES[module])


def test_aliases_are_the_same_things():
    assert ms.optimizers.AdamW is ms.optimizers.Adam
    assert ms.errors.EpochError is ms.errors.CollectiveError
    assert ms.errors.EpochMismatchError is ms.errors.CollectiveMismatchError
    assert ms.errors.EpochTimeoutError is ms.errors.CollectiveTimeoutError
    assert ms.errors.CollectiveError.__name__ == "CollectiveError"
    assert issubclass(ms.errors.CollectiveTimeoutError, TimeoutError)
    variable = ms.Variable(np.ones(2))
    ms.optimizers.AdamW(0.5, weight_decay=0.1).apply_gradients([(np.ones(2), variable)])


def test_cuda_is_the_gpu():
    for make in (ms.OneDeviceStrategy, lambda device: ms.MPIStrategy(device=device)):
        with pytest.raises(ms.errors.LaunchError, match="asks for GPU 99"):
            make("cuda:99")


def test_an_import_does_not_load_the_hints():
    code = "import sys, mpistrat; print('mpistrat.system.migration' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "False"
    assert not inspect.getattr_static(ms, "init", None)
