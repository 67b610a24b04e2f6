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
    if f"{module}.{name}" in sys.modules:
        pytest.skip("another test has imported the module of that name")
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


GUESSES = {
    "strategy.world_size": "strategy.size",
    "strategy.allreduce": "strategy.all_reduce",
    "strategy.all_to_all": "get_replica_context().all_to_all",
    "ms.Dataset": "ms.data.Dataset",
    "ms.ClusterCoordinator": "ms.coordinator.ClusterCoordinator",
    "ms.data.Dataset.from_tensor_slices": "ms.data.Dataset.from_arrays",
    "ms.data.Dataset.from_numpy": "ms.data.Dataset.from_arrays",
    "ms.data.Dataset.from_h5": "ms.data.Dataset.from_hdf5",
    "optimizer.step": "optimizer.apply_gradients",
    "checkpoint.save": "checkpoint.write(path)",
    "manager.restore": "manager.restore_or_initialize()",
    "manager.load": "manager.restore_or_initialize()",
    "manager.latest": "manager.latest_checkpoint",
}


@pytest.mark.parametrize("guess", GUESSES)
def test_a_wrong_first_guess_says_what_to_write(strategy, guess, tmp_path):
    checkpoint = ms.Checkpoint(weight=ms.Variable(0.0))
    names = {
        "ms": ms,
        "strategy": strategy,
        "optimizer": ms.optimizers.Adam(0.1),
        "checkpoint": checkpoint,
        "manager": ms.CheckpointManager(checkpoint, tmp_path),
    }
    with pytest.raises(AttributeError) as info:
        eval(guess, names)
    assert f"Write {GUESSES[guess]}" in str(info.value).replace("inside strategy.run: ms.", "")


def test_other_attributes_are_missing_without_a_hint(strategy):
    for each in (strategy, ms.optimizers.SGD(0.1), ms.data.Dataset):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
            each.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "params"])
def test_pytorchs_arguments_of_optimizers_are_explained(name):
    for kind in (ms.optimizers.SGD, ms.optimizers.Adam):
        with pytest.raises(TypeError, match=rf"{kind.__name__} has no argument '{name}'\. Write "):
            kind(**{name: 0.1})


def test_a_checkpoint_takes_objects_by_name():
    with pytest.raises(TypeError, match=r"Write Checkpoint\(name=object\)"):
        ms.Checkpoint(ms.Variable(0.0))


def test_a_shuffle_needs_a_seed():
    with pytest.raises(TypeError, match=r"Write shuffle\(seed=0\)"):
        ms.data.Dataset.range(3).shuffle()


@pytest.mark.parametrize(
    ("fn", "args", "remedy"),
    [
        (lambda image, label: 0, ((1, 2),), "Write args=batch"),
        (lambda batch: 0, (1, 2), r"Write args=\(batch,\)"),
        (lambda image, label: 0, ({"image": 1, "label": 2},), "Write kwargs=batch"),
    ],
)
def test_arguments_of_run_that_do_not_fit_are_explained(strategy, fn, args, remedy):
    with pytest.raises(TypeError, match=remedy):
        strategy.run(fn, args=args)


def test_an_error_inside_of_the_function_stays_as_it_is(strategy):
    with pytest.raises(TypeError, match="^can only concatenate tuple"):
        strategy.run(lambda batch: batch + "x", args=((1, 2),))


def test_dir_shows_the_documented_names(strategy):
    assert dir(ms) == sorted(ms.__all__)
    shown = set(dir(strategy))
    assert {"run", "distribute_dataset", "all_reduce", "local_results", "xp"} <= shown
    assert not {"unwrap", "configure", "make_dataset_iterator", "update_config_proto"} & shown
