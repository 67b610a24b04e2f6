"""Migration hints: names of TensorFlow, PyTorch and Horovod, and their replacements here.

The module is loaded when a program uses a name that does not exist.
"""

from __future__ import annotations

import sys

_STRATEGY = (
    "ms.MPIStrategy(), on one rank for each GPU: mpiexec -n 4 python train.py. It is for one "
    "machine and for many"
)
_PLACED = "ms.MPIStrategy(): variables live on every replica, and there are no servers"
_REDUCE = (
    "strategy.reduce(op, value, axis=None), or inside strategy.run "
    "ms.get_replica_context().all_reduce(op, value)"
)
_GATHER = (
    "strategy.gather(value, axis=0), or inside strategy.run "
    "ms.get_replica_context().all_gather(value, axis=0)"
)
_EQUAL = "nothing: a variable made in strategy.scope() has the value of rank 0 on every rank"
_APPLY = "ms.optimizers.SGD or Adam: apply_gradients inside strategy.run sums over replicas"
_ARRAY = "numpy or cupy arrays; ms.Variable for trainable values"
_BATCHES = "strategy.distribute_dataset(dataset), which reads each rank's part"
_FILE = "ms.Checkpoint(model=model).write(path) and .restore(path)"
_CLOSE = "strategy.close(), or nothing: MPI ends with the program"
_GRADIENTS = "your own gradients, or PyTorch tensors; ms.gradients differentiates collectives"

_HINTS = {
    "mpistrat": {
        # TensorFlow
        "MirroredStrategy": _STRATEGY,
        "MultiWorkerMirroredStrategy": _STRATEGY,
        "TPUStrategy": _STRATEGY,
        "distribute": "the names of tf.distribute without it, such as ms.get_strategy()",
        "experimental": "the names without it, such as ms.CommunicationOptions",
        "train": _FILE,
        "keras": "ms.optimizers, ms.metrics and ms.layers",
        "losses": "the loss in numpy or cupy, divided by the global batch size",
        "function": "the function itself: nothing is compiled",
        "GradientTape": _GRADIENTS,
        "constant": _ARRAY,
        "Tensor": _ARRAY,
        # PyTorch
        "tensor": _ARRAY,
        "nn": "ms.layers, or PyTorch's own modules with the collectives of this package",
        "optim": "ms.optimizers",
        "cuda": 'ms.MPIStrategy(device="gpu")',
        "device": 'ms.MPIStrategy(device="gpu")',
        "save": _FILE,
        "load": _FILE,
        "init_process_group": "ms.MPIStrategy(), which starts MPI",
        "destroy_process_group": _CLOSE,
        "is_initialized": "ms.has_strategy(), which is true in the scope of a strategy",
        "get_rank": "strategy.rank",
        "get_world_size": "strategy.size",
        "all_reduce": _REDUCE,
        "all_gather": _GATHER,
        "all_gather_object": "strategy.gather_objects(obj)",
        "DistributedDataParallel": _APPLY,
        "DistributedSampler": _BATCHES,
        "DataLoader": "ms.data.Dataset.from_hdf5(files).shuffle(seed=0).batch(256)",
        # Horovod
        "init": "ms.MPIStrategy(), which starts MPI",
        "shutdown": _CLOSE,
        "rank": "strategy.rank",
        "size": "strategy.size",
        "local_rank": "strategy.local_rank",
        "allreduce": _REDUCE,
        "grouped_allreduce": _REDUCE,
        "allgather": _GATHER,
        "allgather_object": "strategy.gather_objects(obj)",
        "broadcast": "strategy.broadcast(value, root=0)",
        "broadcast_object": "strategy.broadcast_object(obj, root=0)",
        "broadcast_variables": _EQUAL,
        "broadcast_parameters": _EQUAL,
        "broadcast_optimizer_state": _EQUAL,
        "barrier": "strategy.barrier()",
        "DistributedOptimizer": _APPLY,
        "DistributedGradientTape": _APPLY,
        # This package
        "Dataset": "ms.data.Dataset",
        "torch": "import mpistrat.torch as mst",
        "ClusterCoordinator": "ms.coordinator.ClusterCoordinator(strategy)",
        "Adam": "ms.optimizers.Adam",
        "SGD": "ms.optimizers.SGD",
        "Sum": 'ms.ReduceOp.SUM, or "sum"',
        "Average": 'ms.ReduceOp.MEAN, or "mean"',
    },
    "mpistrat.optimizers": {
        "DistributedOptimizer": _APPLY,
        "LossScaleOptimizer": "ms.optimizers.SGD(0.1, loss_scale=ms.optimizers.LossScale())",
        "lr_scheduler": "ms.optimizers.schedules",
    },
    "mpistrat.data": {
        "DataLoader": "ms.data.Dataset.from_hdf5(files).shuffle(seed=0).batch(256)",
        "DistributedSampler": _BATCHES,
        "TensorDataset": "ms.data.Dataset.from_arrays(arrays)",
        "TFRecordDataset": "ms.data.Dataset.from_hdf5(files)",
    },
    "mpistrat.metrics": {
        "SparseCategoricalAccuracy": "ms.metrics.Accuracy, which compares class labels",
        "CategoricalAccuracy": "ms.metrics.Accuracy, of the argmax of both",
    },
}


_MOVE = "inside strategy.run: ms.get_replica_context().{}"
_RESTORE = "manager.restore_or_initialize(), or checkpoint.restore(path) for one file"
_SAVE = "checkpoint.write(path), or ms.CheckpointManager(checkpoint, directory).save()"
_STEP = "optimizer.apply_gradients([(gradient, variable), ...]) inside strategy.run"

_ATTRIBUTES = {
    "Strategy": {
        "world_size": "strategy.size",
        "num_ranks": "strategy.size",
        "num_replicas": "strategy.num_replicas_in_sync",
        "is_main_process": "strategy.is_chief",
        "allreduce": "strategy.all_reduce(op, value)",
        "allgather": "strategy.all_gather(value, axis)",
        "bcast": "strategy.broadcast(value, root=0)",
        "all_gather_object": "strategy.gather_objects(obj)",
        "reduce_scatter": _MOVE.format("reduce_scatter(op, value)"),
        "all_to_all": _MOVE.format("all_to_all(value)"),
        "shift": _MOVE.format("shift(value)"),
        "scan": _MOVE.format("scan(op, value)"),
        "start_all_reduce": _MOVE.format("start_all_reduce(op, value)"),
        "merge_call": _MOVE.format("merge_call(fn)"),
        "rng": _MOVE.format("rng(*key)"),
        "experimental_run_v2": "strategy.run(fn, args=(...))",
    },
    "Optimizer": {
        "step": _STEP,
        "minimize": _STEP,
        "update": _STEP,
        "zero_grad": "nothing: gradients are not kept between steps",
        "lr": "optimizer.learning_rate",
        "param_groups": "optimizer.learning_rate and the other parameters by their names",
    },
    "Checkpoint": {
        "save": _SAVE,
        "load": "checkpoint.restore(path)",
        "read": "checkpoint.restore(path)",
    },
    "CheckpointManager": {
        "restore": _RESTORE,
        "load": _RESTORE,
        "restore_latest": _RESTORE,
        "latest": "manager.latest_checkpoint",
        "write": "manager.save(step)",
    },
    "Dataset": {
        "from_tensor_slices": "ms.data.Dataset.from_arrays(arrays)",
        "from_tensors": "ms.data.Dataset.from_arrays(arrays)",
        "from_numpy": "ms.data.Dataset.from_arrays(arrays)",
        "from_array": "ms.data.Dataset.from_arrays(arrays)",
        "from_h5": "ms.data.Dataset.from_hdf5(files)",
        "from_h5py": "ms.data.Dataset.from_hdf5(files)",
        "from_hdf": "ms.data.Dataset.from_hdf5(files)",
        "from_file": "ms.data.Dataset.from_hdf5(files)",
    },
}
"""Replacements for attributes, by the name of the class or of a base class."""


def hint_for(cls: type, name: str) -> str:
    """Return " Write ...." for an attribute that instances of `cls` do not have, or ``""``."""
    for base in cls.__mro__:
        hint = _ATTRIBUTES.get(base.__name__, {}).get(name)
        if hint is not None:
            return f" Write {hint}."
    return ""


def missing_attribute(obj: object, cls: type, name: str) -> AttributeError:
    """Return the error to raise if `obj`, an instance of `cls` or `cls` itself, has no `name`."""
    what = f"type object {cls.__name__!r}" if obj is cls else f"{cls.__name__!r} object"
    message = f"{what} has no attribute {name!r}"
    hint = "" if name.startswith("_") else hint_for(cls, name)
    return AttributeError(f"{message}.{hint}" if hint else message, name=name, obj=obj)


def missing_name(module: str, name: str) -> AttributeError:
    """Return the error to raise if `module` has no attribute `name`."""
    message = f"module {module!r} has no attribute {name!r}"
    hint = _HINTS[module].get(name)
    if hint is not None:
        message += f". Write {hint}."
    return AttributeError(message, name=name, obj=sys.modules[module])
