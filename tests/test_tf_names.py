"""The page for users of tf.distribute names the whole strategy API, and tells the truth."""

import inspect
import re

import pytest

import mpistrat as ms
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.extended_v1 import InputIterator
from tests import ROOT

NAMES = ("tf-distribute-names", "tf-distribute-v1-names", "tf-data-names")
PAGE = "\n".join((ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in NAMES)
STATES = {"same", "wider", "differs", "ignored", "absent"}

# The public names of tf.distribute's strategy API, by the section of the page they stand in.
SEEDS = {
    "Classes": """
        Strategy StrategyExtended ReplicaContext InputContext ValueContext RunOptions InputOptions
        InputReplicationMode MultiStepContext DistributedValues DistributedDataset InputIterator
        ReduceOp CommunicationOptions ClusterResolver OneDeviceStrategy MirroredStrategy
        MultiWorkerMirroredStrategy TPUStrategy TPUClusterResolver CentralStorageStrategy
        ParameterServerStrategy ParameterServerStrategyV1 ShardedVariable partitioners
    """,
    "Functions": """
        get_strategy has_strategy in_cross_replica_context get_replica_context
        experimental_set_strategy get_loss_reduction
    """,
    "Strategy": """
        __init__ extended num_replicas_in_sync cluster_resolver scope run reduce gather
        experimental_local_results experimental_distribute_dataset
        distribute_datasets_from_function experimental_distribute_values_from_function __copy__
        __deepcopy__ experimental_split_to_logical_devices experimental_assign_to_logical_device
        experimental_replicate_to_logical_devices
    """,
    "Strategy, version 1 and deprecated": """
        unwrap experimental_run make_dataset_iterator make_input_fn_iterator
        experimental_distribute_datasets_from_function experimental_make_numpy_dataset
        colocate_vars_with group configure update_config_proto
    """,
    "InputIterator": "get_next get_next_as_optional initialize initializer",
    "StrategyExtended": """
        __init__ worker_devices parameter_devices experimental_require_static_shapes reduce_to
        batch_reduce_to update colocate_vars_with variable_created_in_scope value_container
    """,
    "StrategyExtended, version 1": """
        call_for_each_replica broadcast_to read_var experimental_make_numpy_dataset
        experimental_run_steps_on_iterator non_slot_devices update_non_slot
        experimental_between_graph experimental_should_init should_checkpoint should_save_summary
    """,
    "MultiStepContext": """
        set_last_step_output set_non_tensor_output last_step_outputs non_tensor_outputs run_op
    """,
    "ReplicaContext": """
        __init__ __enter__ __exit__ strategy num_replicas_in_sync replica_id_in_sync_group devices
        merge_call all_reduce all_gather start_all_reduce
    """,
    "InputContext": """
        num_input_pipelines input_pipeline_id num_replicas_in_sync get_per_replica_batch_size
    """,
    "ValueContext": "replica_id_in_sync_group num_replicas_in_sync",
    "RunOptions": """
        experimental_enable_dynamic_batch_size experimental_bucketizing_dynamic_shape
    """,
    "InputOptions": """
        experimental_prefetch_to_device experimental_replication_mode
        experimental_place_dataset_on_device
    """,
    "InputReplicationMode": "PER_WORKER PER_REPLICA",
    "ReduceOp": "SUM MEAN",
    "The default strategy": """
        scope run call_for_each_replica reduce reduce_to batch_reduce_to gather broadcast_to update
        update_non_slot experimental_local_results value_container variable_created_in_scope
        colocate_vars_with non_slot_devices read_var worker_devices parameter_devices
        should_checkpoint should_save_summary experimental_distribute_dataset
        distribute_datasets_from_function experimental_distribute_values_from_function
        make_dataset_iterator make_input_fn_iterator experimental_make_numpy_dataset
    """,
}

INTERNAL = """
    StrategyBase StrategyV1 StrategyExtendedV1 StrategyExtendedV2 ReplicaContextBase
    ReplicaContextV1 UpdateContext get_update_replica_id require_replica_context
    distribution_strategy_gauge distribution_strategy_replica_gauge
"""

# That they warn is tested in tests/strategies/test_extended_v1.py.
DEPRECATED = """
    unwrap experimental_run make_dataset_iterator make_input_fn_iterator colocate_vars_with
    experimental_distribute_datasets_from_function devices update_non_slot non_slot_devices
    experimental_run_steps_on_iterator
"""

ELSEWHERE = {
    "DistributedDataset": ms.data.DistributedDataset,
    "InputIterator": InputIterator,
    "ClusterResolver": ClusterResolver,
}


def section(title):
    """Return the text of the page between the heading `title` and the next one."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^##? |\Z)", PAGE, re.M | re.S)
    return text


def rows(title):
    """Return the cells of the rows of a section's table, heads aside."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(text):
    return re.findall(r"`(\w+)`", text)


def states(title):
    """Return the state of each name in a section's table, and fail where one stands twice."""
    pairs = [(name, state) for cell, state, _ in rows(title) for name in named(cell)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def owners(title):
    """Return what must have the names of a section: classes, and instances for their fields."""
    name = title.split(",")[0]
    if name == "Classes" or name == "Functions":
        return (ms,)
    if name == "The default strategy":
        return (ms.Strategy, ms.StrategyExtended)
    return (ELSEWHERE.get(name) or getattr(ms, name),)


def of_seeds(class_name):
    return {
        name
        for title, names in SEEDS.items()
        if title.split(",")[0] == class_name
        for name in names.split()
    }


def beyond(owner):
    """Return the names that the page lists as ours alone."""
    listed = {first.strip("`"): rest for first, rest in rows("Beyond tf.distribute")}
    return set(named(listed.get(owner, "")))


@pytest.mark.parametrize("title", SEEDS)
def test_a_section_has_each_name_and_no_other(title):
    assert set(states(title)) == set(SEEDS[title].split())
    assert set(states(title).values()) <= STATES


def test_there_is_no_other_table_of_names():
    titles = re.findall(r"^## (.*)\n+(?:[^|#]*\n)?\| name \| here \|", PAGE, re.M)
    assert set(titles) == set(SEEDS)


@pytest.mark.parametrize("title", SEEDS)
def test_what_the_page_says_exists_exists(title):
    for name, state in states(title).items():
        exists = name in ELSEWHERE or any(hasattr(owner, name) for owner in owners(title))
        assert exists == (state != "absent"), name


def test_instances_have_the_properties_too():
    strategy = ms.OneDeviceStrategy()
    for title, instance in (
        ("Strategy", strategy),
        ("Strategy, version 1 and deprecated", strategy),
        ("StrategyExtended", strategy.extended),
        ("StrategyExtended, version 1", strategy.extended),
        ("InputContext", ms.InputContext()),
        ("ValueContext", ms.ValueContext()),
        ("RunOptions", ms.RunOptions()),
        ("InputOptions", ms.InputOptions()),
    ):
        for name in SEEDS[title].split():
            assert hasattr(instance, name), name


def test_names_that_are_internal_there_are_listed_and_not_public_here():
    listed = [name for there, _ in rows("Internal there, absent here") for name in named(there)]
    assert sorted(listed) == sorted(INTERNAL.split())
    assert not set(listed) & set(ms.__all__)


def test_the_names_of_the_coordinator_exist():
    ((there, _),) = rows("tf.distribute.coordinator")
    assert set(named(there)) == set(ms.coordinator.__all__)


def test_ignored_names_are_listed():
    found = [pair for title in SEEDS for pair in states(title).items()]
    marked = {name for name, state in found if state == "ignored"}
    assert set(named(section("Ignored"))) - {"non_slot_devices"} == marked


def test_deprecated_names_are_marked():
    marked = [cell for title in SEEDS for cell, *_ in rows(title) if "†" in cell]
    assert sorted(name for cell in marked for name in named(cell)) == sorted(DEPRECATED.split())


@pytest.mark.parametrize(
    "class_name",
    [
        "Strategy",
        "StrategyExtended",
        "ReplicaContext",
        "InputContext",
        "ValueContext",
        "RunOptions",
        "InputOptions",
        "InputReplicationMode",
        "MultiStepContext",
        "DistributedValues",
        "ReduceOp",
    ],
)
def test_each_member_of_our_classes_is_of_the_seeds_or_said_to_be_ours(class_name):
    cls = getattr(ms, class_name)
    bases = [base for base in cls.__mro__ if base.__module__.startswith("mpistrat")]
    ours = {name for base in bases for name in vars(base)} | set(getattr(cls, "__members__", ()))
    if cls is ms.StrategyExtended:
        ours |= set(vars(ms.OneDeviceStrategy().extended))
    ours = {name for name in ours if not name.startswith("_")}
    assert ours - of_seeds(class_name) == beyond(class_name)


def test_each_of_our_functions_is_of_the_seeds_or_said_to_be_ours():
    functions = {name for name in ms.__all__ if inspect.isfunction(getattr(ms, name))}
    assert functions - of_seeds("Functions") == beyond("functions")
