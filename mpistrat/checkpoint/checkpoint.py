"""`Checkpoint`: the objects that are saved and restored together."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from mpistrat.checkpoint.object_graph import check_can_hold_state, collectives_for, tree_of
from mpistrat.checkpoint.plan import SavePlan
from mpistrat.checkpoint.restore import RestoreStatus, restore
from mpistrat.checkpoint.write import write_together
from mpistrat.checkpoint.writer import file_of_root
from mpistrat.collectives.collectives import Collectives
from mpistrat.context import collective
from mpistrat.system.migration import hint_for
from mpistrat.system.text import brief, html_table
from mpistrat.tracing.spans import spanned
from mpistrat.trackable import Trackable

_WHAT = "Checkpoint.write"
_RESTORE = "Checkpoint.restore"
_logger = logging.getLogger("mpistrat")


@spanned("checkpoint", _WHAT)
def save(
    root: Trackable,
    path: str | os.PathLike[str],
    step: int = -1,
    parallel: bool = False,
    created_s: float | None = None,
    drift: str = "warn",
    overwrite: bool | None = None,
) -> str:
    """Write the state below `root` to `path`, and return it as a string. **Collective**.

    Variables are sent one at a time to rank 0. Sharded tensors are not sent: each rank writes its
    shards. If `parallel`, values that all ranks hold are not sent either: each rank writes some of
    them. If `overwrite` is None, `path` has a name that only a `CheckpointManager` uses.
    """
    began_s = time.perf_counter()
    plan = SavePlan(root, _WHAT, path, parallel, True, drift, overwrite)
    collectives, target = plan.collectives, plan.path
    if not plan.writes_here:
        return target
    header = plan.header(step, created_s)
    with file_of_root(collectives, _WHAT, target, header, plan.writers) as file:
        shared = []
        for item in plan.items():
            if item.is_shared:
                shared.append(item)
            else:
                file.write(item)
            del item  # or the next would be created while this one exists
        if shared:
            write_together(file, collectives, _WHAT, target, shared)
    if collectives.rank == 0:
        _logger.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - began_s)
    return target


_OWN_ATTRIBUTES = frozenset({"_children", "_dependents", "_on_new_child"})


def _ranks(checkpoint: Checkpoint, what: str) -> Collectives:
    """Return the ranks of the strategy of all objects."""
    return collectives_for(tree_of(checkpoint), what)


class Checkpoint(Trackable):
    """A group of named objects whose state is saved to one HDF5 file and restored from it.

    Parameters
    ----------
    **objects
        Variables, optimizers, metrics, distributed datasets, `numpy.random.Generator`, modules,
        optimizers, schedulers, scalers and generators of PyTorch, objects with ``state_dict()``
        and ``load_state_dict()`` of arrays, tensors and JSON values, other checkpoints, objects
        with any of these as attributes, and dicts, lists, tuples and deques of all these.
        The names are the first part of the paths in the file. ``checkpoint.name = object`` adds an
        object later.

    Raises
    ------
    TypeError
        For objects without state, such as numbers and arrays, and objects without a name.
    ValueError
        For a name that is a method of this class.

    Examples
    --------
    >>> weight = ms.Variable(np.zeros(2), name="weight")
    >>> checkpoint = ms.Checkpoint(weight=weight)
    >>> checkpoint.write("run.h5")
    'run.h5'
    >>> checkpoint.restore("run.h5").assert_consumed()
    <RestoreStatus of 'run.h5': 1 restored, 0 still waiting>
    """

    def __init__(self, /, *unnamed: object, **objects: object) -> None:
        super().__init__()
        if unnamed:
            raise TypeError(
                "Checkpoint needs a name for each object, which is the first part of their paths "
                f"in the file, but got {brief(unnamed[0])} without one. Write "
                "Checkpoint(name=object)."
            )
        for name, each in objects.items():
            if name in _OWN_ATTRIBUTES:
                raise ValueError(f"{name!r} cannot name an object. Use a different name.")
            setattr(self, name, each)

    @collective(_WHAT, of=lambda checkpoint: _ranks(checkpoint, _WHAT))
    def write(
        self,
        path: str | os.PathLike[str],
        *,
        parallel: bool = False,
        drift: str = "warn",
        overwrite: bool = False,
    ) -> str:
        """Save all objects to exactly `path`, and return it on every rank. **Collective**.

        Rank 0 writes the file, and creates missing folders. Mirrored variables are saved from rank
        0, once the ranks have compared digests of them. SyncOnRead variables are saved aggregated
        over replicas. Generators, plain variables and other state must be equal on all ranks; wrap
        state that differs in `PerReplicaState`. Modules and optimizers of PyTorch are saved from
        rank 0, because they are replicas of one another; `drift` decides what happens if their
        tensors differ. Of sharded tensors (DTensor) each rank writes its own shards, so all ranks
        must see the folder. The file appears under its name once it is complete and on disk.

        Outside of any strategy, and without a process group of torch.distributed, it is **Local**
        if the checkpoint has a variable, or MPI has not been started. In a job of several ranks,
        rank 0 then writes, and the other ranks return at once, before the file is there: a rank
        that needs the file must wait, for example with ``strategy.barrier()``. If exactly one
        strategy on several ranks is open, objects without a variable still count as that strategy's
        objects. Otherwise, if MPI has been started, the ranks of the job compare them.

        The ranks of this job that write a path first own it, until their strategy is closed, the
        job ends or the file is removed.

        Parameters
        ----------
        path : path
            The file to write, the same on all ranks.
        parallel : bool
            Whether all ranks that see the file write to it: each writes some of the large mirrored
            variables, whose values are the same on all ranks. This is for states of many GiB on a
            parallel file system, where one node cannot write as fast as several. The file is the
            same.
        drift : str
            What to do if the replicas of a mirrored variable, of a PyTorch parameter or of a
            PyTorch optimizer's slot differ, which never happens in a correct program. ``"warn"``
            saves rank 0's values with a `ReplicaDriftWarning` that names them, ``"raise"`` saves
            nothing, ``"ignore"`` compares nothing.
        overwrite : bool
            Whether to replace a file at `path` that is not a checkpoint.

        Returns
        -------
        str
            `path` as a string, the same on every rank.

        Raises
        ------
        CheckpointError
            On every rank, if the file cannot be written, if state differs between ranks, if other
            ranks of this job have written `path`, if the file at `path` is not a checkpoint, if it
            is unknown to which strategy a `PerReplicaState` belongs, or if restored values still
            wait for their objects and `RestoreStatus.expect_partial` has not been called. A file
            that was there before is unchanged.
        ReplicaDriftError
            On every rank, with ``drift="raise"``. It is a `CheckpointError` too.
        TypeError
            If an argument has the wrong type, an object has no state, or a variable or state a type
            that a checkpoint does not store.
        ValueError
            If `drift` has a different value, if a SyncOnRead variable has the aggregation NONE, or
            if the ranks have different objects.
        ContextError
            Inside ``strategy.run``.
        """
        return save(self, path, parallel=parallel, drift=drift, overwrite=overwrite)

    @collective(_RESTORE, writes=True, of=lambda checkpoint: _ranks(checkpoint, _RESTORE))
    def restore(self, path: str | os.PathLike[str]) -> RestoreStatus:
        """Fill all objects that the file `path` has, or change none. **Collective**.

        Objects that the file lacks keep their values, with a warning: call
        `RestoreStatus.assert_consumed` on the result to get an error.

        The ranks of rank 0's node check every digest together, each a part of the file. If there
        are other nodes, they hold the values in about equal parts and broadcast them; otherwise
        each rank reads large values again, straight into its objects. Of a large sharded tensor
        each rank reads its own shards, if it sees the file.
        SyncOnRead variables with SUM get value / N on each of today's N replicas, other SyncOnRead
        variables get the value. Objects that are attached later, and variables that optimizers
        create later, are filled when they appear.

        Parameters
        ----------
        path : path
            A file that `write` or a `CheckpointManager` has saved. The same on all ranks.

        Returns
        -------
        RestoreStatus
            Object whose methods check whether the paths of the file and of the program match.

        Raises
        ------
        CheckpointError
            If there is no such file, or it has a different or a newer format.
        CheckpointCorruptError
            If the file is damaged.
        CheckpointMismatchError
            If shapes or dtypes differ, or the keys of a module, or the groups of an optimizer; the
            message names all of them. No value is cast. Arrays of other objects' ``state_dict()``
            may differ in the first dimension.
        TypeError
            If `path` is not a path, for example the ``None`` that `latest_checkpoint` may return.
        """
        return restore(self, path)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
            return
        if hasattr(type(self), name):
            raise ValueError(
                f"{name!r} is a method of Checkpoint and cannot name an object. Use a different "
                "name."
            )
        check_can_hold_state(name, value)
        self._attach_child(name, value)

    def __getattr__(self, name: str) -> Any:
        children = vars(self).get("_children", {})
        if name in children:
            return children[name]
        raise AttributeError(
            f"The checkpoint has no object {name!r}. It has: {', '.join(children) or 'none'}."
            + hint_for(Checkpoint, name)
        )

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self._children[name]

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._children)})"

    def _repr_html_(self) -> str:
        try:
            tree = tree_of(self)
        except (TypeError, ValueError) as error:  # which `write` raises too
            return html_table(f"{self!r} cannot be saved: {error}", [])
        rows: list[tuple[object, ...]] = [
            (path, variable.dtype, variable.full_shape, type(variable).__name__)
            for path, variable in tree.variables.items()
        ]
        rows += [(path, "", "", type(each).__name__) for path, each in tree.stateful.items()]
        return html_table(repr(self), rows, ("path", "dtype", "shape", "kind"))
