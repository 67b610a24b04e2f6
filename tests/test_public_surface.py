"""The public names of the classes that programs hold, frozen.

A name that appears or disappears fails here. Where that is meant, change the table, the pages of
docs/reference/ and CHANGELOG.md; otherwise begin the name with an underscore. A class has the names
of its bases in the table too, and the attributes of an instance count.
"""

import inspect

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import data, layers, metrics, optimizers, partitioners
from mpistrat.checkpoint.restore import RestoreStatus
from mpistrat.collectives.nest_reductions import PendingReduction
from mpistrat.data.iterators import ElementIterator, Optional
from mpistrat.optimizers import schedules
from mpistrat.replica import ShardGroup
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.extended_v1 import InputIterator

SURFACE = {
    # Strategies
    ms.Strategy: """
        close cluster_resolver colocate_vars_with configure distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_datasets_from_function
        experimental_distribute_values_from_function experimental_local_results
        experimental_make_numpy_dataset experimental_run extended gather group
        experimental_assign_to_logical_device experimental_replicate_to_logical_devices
        experimental_split_to_logical_devices
        make_dataset_iterator make_input_fn_iterator num_replicas_in_sync reduce run scope unwrap
        update_config_proto
        rank size local_rank is_chief barrier broadcast_object gather_objects
        distribute_dataset distribute_values_from_function local_results xp assert_replicas_agree
        all_reduce all_gather broadcast scatter
    """,
    ms.MPIStrategy: "",
    ms.CentralStorageStrategy: "",
    ms.ParameterServerStrategy: "is_fault_tolerant serve",
    ms.OneDeviceStrategy: "",
    ms.StrategyExtended: """
        assert_replicas_agree batch_reduce_to broadcast_to call_for_each_replica
        colocate_vars_with device dump_flight_record experimental_between_graph gradient_buffers
        experimental_make_numpy_dataset experimental_require_static_shapes
        experimental_run_steps_on_iterator experimental_should_init local_replica_ids
        non_slot_devices
        parameter_devices read_var reduce_to should_checkpoint should_save_summary update
        update_non_slot value_container variable_created_in_scope worker_devices xp
    """,
    ms.ReplicaContext: """
        all_gather all_gather_object all_reduce all_to_all barrier broadcast broadcast_object
        devices merge_call num_replicas_in_sync reduce_scatter replica_id_in_sync_group rng scan
        scatter shards shift start_all_reduce strategy
    """,
    ShardGroup: """
        all_gather all_gather_object all_reduce all_to_all barrier broadcast broadcast_object count
        index reduce_scatter scan scatter shift start_all_reduce
    """,
    ms.MultiStepContext: """
        last_step_outputs non_tensor_outputs set_last_step_output set_non_tensor_output
    """,
    PendingReduction: "wait",
    ClusterResolver: "hosts launcher local_rank num_workers task_id task_type",
    # Values and variables
    ms.DistributedValues: "values",
    ms.PerReplica: "",
    ms.Mirrored: "",
    ms.IndexedSlices: "dense_shape indices values",
    ms.Variable: """
        aggregation assign assign_add assign_sub batch_scatter_update device dtype full_shape lookup
        name ndim numpy part read_value row_range scatter_add scatter_div scatter_max scatter_min
        scatter_mul scatter_sub scatter_update shape size split_axis storage strategy
        synchronization trainable value values
    """,
    ms.ShardedVariable: "assign_part devices row_ranges",
    partitioners.Partitioner: "",
    partitioners.FixedShardsPartitioner: "",
    partitioners.MinSizePartitioner: "",
    partitioners.MaxSizePartitioner: "",
    # Options
    ms.CommunicationImplementation: "AUTO MPI NCCL SHARED STAGED",
    ms.CommunicationOptions: """
        bytes_per_pack deterministic implementation timeout_seconds wire_dtype
    """,
    ms.InputContext: """
        get_per_replica_batch_size input_pipeline_id num_input_pipelines num_replicas_in_sync
    """,
    ms.InputOptions: """
        experimental_place_dataset_on_device experimental_prefetch_to_device
        experimental_replication_mode
    """,
    ms.InputReplicationMode: "PER_REPLICA PER_WORKER",
    ms.ReduceOp: "MAX MEAN MIN PROD SUM parse",
    ms.RunOptions: """
        experimental_bucketizing_dynamic_shape experimental_enable_dynamic_batch_size
    """,
    ms.ValueContext: "num_replicas_in_sync replica_id_in_sync_group",
    ms.VariableAggregation: "MEAN NONE ONLY_FIRST_REPLICA SUM",
    ms.VariableSynchronization: "AUTO NONE ON_READ ON_WRITE",
    # Data
    data.ArraySpec: "dtype shape",
    data.AutoShardPolicy: "AUTO DATA FILE OFF",
    data.Dataset: """
        batch cache cardinality concatenate element_spec enumerate filter flat_map from_arrays
        from_generator from_hdf5 from_source ignore_errors load_state_dict map padded_batch
        prefetch ragged_batch range repeat sample sample_from_datasets select shard shuffle skip
        state_dict take unbatch window with_options zip
    """,
    data.Field: "attribute axis path",
    data.HDF5Writer: "append close closed create_dataset create_group flush "
    "load_state_dict mode path rows set_attrs state_dict steps write",
    data.DistributedDataset: "cardinality element_spec load_state_dict state_dict strategy",
    data.Ragged: "from_list nbytes row_lengths row_splits to_list values",
    ElementIterator: "close get_next get_next_as_optional",
    InputIterator: "get_next get_next_as_optional initialize",
    Optional: "get_value has_value",
    # Checkpoints
    ms.Checkpoint: "restore write",
    RestoreStatus: "assert_consumed assert_existing_objects_matched expect_partial",
    ms.CheckpointManager: """
        checkpoint checkpoints directory latest_checkpoint restore_or_initialize save wait
    """,
    ms.PerReplicaState: "load_state_dict state_dict",
    ms.PreemptionCheckpointHandler: "EXIT_CODE close save_checkpoint_if_preempted",
    # Training
    optimizers.Optimizer: """
        apply_gradients global_clipnorm iterations learning_rate loss_scale sharded_slots slot
        weight_decay
    """,
    optimizers.SGD: "momentum nesterov",
    optimizers.Adam: "beta_1 beta_2 epsilon",
    optimizers.ExponentialMovingAverage: "apply average decay num_updates",
    optimizers.GradientAccumulator: "add apply grads_and_vars num_added reset variables",
    optimizers.LossScale: """
        backoff_factor growth_factor growth_interval initial_scale num_skipped_steps value
    """,
    schedules.LearningRateSchedule: "",
    schedules.Constant: "learning_rate",
    schedules.CosineDecay: "alpha decay_steps initial_learning_rate warmup_steps warmup_target",
    schedules.ExponentialDecay: "decay_rate decay_steps initial_learning_rate staircase",
    schedules.PiecewiseConstantDecay: "boundaries values",
    metrics.Metric: "name reset_state result",
    metrics.AUC: """
        curve from_logits num_thresholds summation_method thresholds update_state
    """,
    metrics.Accuracy: "update_state",
    metrics.ConfusionMatrix: "num_classes update_state",
    metrics.F1: "average threshold update_state",
    metrics.Mean: "update_state",
    metrics.MeanIoU: """
        axis ignore_class num_classes sparse_y_pred sparse_y_true update_state
    """,
    metrics.MeanSquaredError: "update_state",
    metrics.Precision: "class_id thresholds top_k update_state",
    metrics.Recall: "class_id thresholds top_k update_state",
    metrics.Sum: "update_state",
    metrics.TopKAccuracy: "k update_state",
    layers.BatchNorm: """
        axis backward beta epsilon forward gamma momentum moving_mean moving_variance name
        num_features synchronized
    """,
    # Closures
    ms.coordinator.ClusterCoordinator: """
        create_per_worker_dataset done fetch join map schedule strategy
    """,
    ms.coordinator.PerWorkerValues: "get_next",
    ms.coordinator.RemoteValue: "fetch get",
    # Tests
    ms.testing.Injection: "fault is_done remove",
}

NOT_HELD = {ms.testing.StrategyTests}
"""Base of a test suite, whose names are tests and hooks."""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """One object, or several, of each class in the table that is not abstract or an enum."""
    values = np.ones(4, np.float32)
    strategy, default = ms.OneDeviceStrategy(), ms.get_strategy()
    objects = [strategy, strategy.extended, strategy.cluster_resolver, default, default.extended]
    replica = ms.get_replica_context()
    objects += [replica, replica.shards, ms.MultiStepContext(strategy)]
    objects += [ms.DistributedValues(values), ms.PerReplica(values), ms.Mirrored(values)]
    objects += [ms.IndexedSlices([1.0], [0]), ms.CommunicationOptions(), ms.InputOptions()]
    objects += [ms.RunOptions(), ms.InputContext(), ms.ValueContext(), ms.Variable(values)]
    objects += [schedules.Constant(0.1), schedules.CosineDecay(0.1, 10)]
    objects += [schedules.ExponentialDecay(0.1, 10, 0.5)]
    objects += [schedules.PiecewiseConstantDecay([1], [0.1, 0.2])]
    with strategy.scope():
        on_read = ms.VariableSynchronization.ON_READ
        variables = [ms.Variable(values), ms.Variable(values, synchronization=on_read)]
        objects += [*variables, optimizers.SGD(0.1), optimizers.Adam(0.1), optimizers.LossScale()]
        objects += [optimizers.GradientAccumulator(variables[:1]), layers.BatchNorm(4)]
        objects += [optimizers.ExponentialMovingAverage(0.9)]
        objects += [metrics.Accuracy(), metrics.Mean(), metrics.MeanSquaredError(), metrics.Sum()]
        objects += [metrics.TopKAccuracy(), metrics.AUC(), metrics.F1(), metrics.MeanIoU(2)]
        objects += [metrics.ConfusionMatrix(2), metrics.Precision(), metrics.Recall()]
        dataset = data.Dataset.range(8).batch(4)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        objects += [dataset, dataset.element_spec, distributed, iterator]
        objects += [data.Ragged([1, 2], [0, 2]), data.Field("x")]
        with data.HDF5Writer(tmp_path_factory.mktemp("written") / "file.h5") as writer:
            objects += [writer]
        objects += [iterator.get_next_as_optional(), InputIterator(distributed)]
        checkpoint = ms.Checkpoint(variable=variables[0])
        manager = ms.CheckpointManager(checkpoint, tmp_path_factory.mktemp("surface"))
        objects += [checkpoint, manager, checkpoint.restore(manager.save())]
        handler = ms.PreemptionCheckpointHandler(manager)
        handler.close()
        with ms.testing.inject("exit:1", collective=10**6) as injection:
            objects += [handler, injection, ms.PerReplicaState(np.random.default_rng(0))]
    objects += [strategy.run(_start_reduction)]
    fixed = partitioners.FixedShardsPartitioner(2)
    objects += [fixed, partitioners.MinSizePartitioner(), partitioners.MaxSizePartitioner(1)]
    with ms.MPIStrategy(variable_partitioner=fixed).scope():
        objects += [ms.Variable(np.ones((4, 2)))]
    central = ms.CentralStorageStrategy()
    objects += [central, central.extended]
    servers = ms.ParameterServerStrategy()
    coordinator = ms.coordinator.ClusterCoordinator(servers)
    iterator = iter(coordinator.create_per_worker_dataset(_start_reduction))
    objects += [servers, coordinator, iterator, coordinator.schedule(len, ("text",))]
    return objects


def _start_reduction():
    pending = ms.get_replica_context().start_all_reduce("SUM", np.ones(2))
    pending.wait()
    return pending


def expected(cls):
    return {name for base in cls.__mro__ for name in SURFACE.get(base, "").split()}


def found(cls, instance=None):
    """Return the public names that `cls` and an instance have from this package."""
    names = set(getattr(cls, "__members__", ()))  # of an enum
    for base in cls.__mro__:
        if base.__module__.startswith("mpistrat."):
            names |= {*vars(base), *vars(base).get("__annotations__", ())}
    names |= set(getattr(instance, "__dict__", ()))
    return {name for name in names if not name.startswith("_")}


def complaint(cls, names):
    frozen = expected(cls)
    return (
        f"{cls.__name__} has the new public names {sorted(names - frozen)}, and has lost "
        f"{sorted(frozen - names)}. The docstring of this file says what to do."
    )


def test_the_table_has_every_public_class():
    modules = [ms, data, layers, metrics, optimizers, partitioners, schedules, ms.errors]
    modules += [ms.coordinator, ms.testing]
    exported = [getattr(module, name) for module in modules for name in module.__all__]
    assert {each for each in exported if inspect.ismodule(each)} <= {*modules, ms.gradients}
    classes = {each for each in exported if isinstance(each, type)} - NOT_HELD
    errors = {each for each in classes if issubclass(each, BaseException)}
    assert classes - errors - set(SURFACE) == set()
    assert [each for each in errors if found(each)] == [], "errors have no attributes of their own"


@pytest.mark.parametrize("cls", SURFACE, ids=lambda cls: cls.__name__)
def test_a_class_has_these_public_names_and_no_other(cls, held):
    instances = [each for each in held if isinstance(each, cls)]
    needs_none = cls is ms.MPIStrategy or hasattr(cls, "__members__")
    assert instances or needs_none, f"the fixture must make a {cls.__name__}"
    for instance in instances or [None]:
        actual = cls if instance is None else type(instance)
        names = found(actual, instance)
        assert names == expected(actual), complaint(actual, names)
