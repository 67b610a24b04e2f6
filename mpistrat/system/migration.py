"""Migration hints: names of TensorFlow, PyTorch and Horovod, and what to write here.

Loaded when a program asks for a name that does not exist.
"""

from __future__ import annotations

import sys

__all__ = ["missing_name"]

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
_ARRAY = "numpy or cupy arrays; ms.Variable for what is trained"
_BATCHES = "strategy.experimental_distribute_dataset(dataset), which gives each rank its part"
_FILE = "ms.Checkpoint(model=model).write(path) and .restore(path)"
_CLOSE = "strategy.close(), or nothing: MPI ends with the program"
_GRADIENTS = "gradients of your own, or PyTorch tensors; ms.gradients has those of the collectives"

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
        "broadcast": 'strategy.extended.broadcast_to(array, "cpu:0")',
        "broadcast_object": "strategy.broadcast_object(obj, root=0)",
        "broadcast_variables": _EQUAL,
        "broadcast_parameters": _EQUAL,
        "broadcast_optimizer_state": _EQUAL,
        "barrier": "strategy.barrier()",
        "DistributedOptimizer": _APPLY,
        "DistributedGradientTape": _APPLY,
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


def missing_name(module: str, name: str) -> AttributeError:
    """Return the error to raise where `module` has no attribute `name`."""
    message = f"module {module!r} has no attribute {name!r}"
    hint = _HINTS[module].get(name)
    if hint is not None:
        message += f". Write {hint}."
    return AttributeError(message, name=name, obj=sys.modules[module])
