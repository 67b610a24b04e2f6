"""Collecting state on rank 0, which stays in step with the other ranks if it fails."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from mpistrat.arrays import Array, host_view
from mpistrat.checkpoint.deferred import check_nothing_waits
from mpistrat.checkpoint.digests import digest_of_text
from mpistrat.checkpoint.drift_at_save import drifted_variables, mirrored_digests, tensor_digests
from mpistrat.checkpoint.format import Header, is_storable
from mpistrat.checkpoint.json_marks import marked
from mpistrat.checkpoint.object_graph import Tree, split_object, walk
from mpistrat.checkpoint.ownership import (
    Replaces,
    Writers,
    check_may_replace,
    warn_if_unconnected,
    writes_here,
)
from mpistrat.checkpoint.ranks import agree_on_path, collectives_for_save
from mpistrat.checkpoint.replica_state import (
    PerReplicaState,
    assign_replicas,
    gather_states,
)
from mpistrat.checkpoint.state_json import SplitState, split_state
from mpistrat.checkpoint.torch_hook import Box, TensorArray, TensorState
from mpistrat.checkpoint.writer import (
    BufferLifetime,
    Item,
    replicas_item,
    state_item,
    variable_item,
)
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError, ContextError
from mpistrat.system.text import rank_list
from mpistrat.system.xxh3 import digest_of_values
from mpistrat.trackable import Trackable
from mpistrat.variables import MirroredVariable, SyncOnReadVariable, Variable
from mpistrat.variables.drift import digest_of
from mpistrat.variables.kinds import WrittenTogether
from mpistrat.variables.placement import BYTES_PER_PIECE, Block

_logger = logging.getLogger("mpistrat")


class StateCollector:
    """The state of the objects below `root`, checked and on its way to rank 0.

    Making one is **Collective**: all ranks prove that they have the same objects, and that these
    can be saved.

    Attributes
    ----------
    collectives : Collectives
    path : str
    """

    def __init__(
        self,
        root: Trackable,
        what: str,
        path: str | os.PathLike[str],
        parallel: bool = False,
        keeps_shards: bool = False,
        drift: str = "warn",
        overwrite: bool | None = None,
    ) -> None:
        self._tree = tree = walk(root._checkpoint_children())
        self.collectives: Collectives = collectives_for_save(tree, what)
        replaces = Replaces.OWN_NAMES
        if overwrite is not None:
            replaces = Replaces.ANYTHING if overwrite else Replaces.CHECKPOINTS
        self.path = agree_on_path(
            *(self.collectives, what, path, drift),
            parallel=parallel,
            overwrite=False if overwrite is None else overwrite,
        )
        self._what = what
        self._keeps_shards = keeps_shards
        """Whether sharded tensors stay where they are, and are not brought to rank 0."""
        self.writers = Writers.of(self.collectives)
        self.writes_here = writes_here(tree, self.collectives)
        """Whether this job's part of the ranks writes the file; outside of strategies rank 0."""
        if not self.writes_here:
            _warn_of_root(what)
        elif self.collectives.size == 1:
            warn_if_unconnected(what, self.path)
        self._states: dict[str, SplitState] = {}
        self._of_replicas: dict[str, list[SplitState]] = {}
        """What each `PerReplicaState` has on this rank, by path."""
        self._mirrored: dict[str, str] = {}
        """Digests of mirrored variables and of tensors, by path."""
        self._keys: dict[str, set[str]] = {}
        """Of the tensors that are to be equal on all ranks, by the path of their object."""
        self._drifted: set[str] = set()
        # Three short digests per rank are exchanged, however large the state is. Details are
        # gathered only if they differ.
        of_ranks = self.collectives.on_all(
            lambda: self._check(root, replaces, drift), what, self.path
        )
        # Paths first: states and values can be compared by name only if all ranks have the same
        # names.
        if any(each[0] != of_ranks[0][0] for each in of_ranks):
            _refuse_differing(self.collectives, what, self.path, tree)
        if any(each[1] != of_ranks[0][1] for each in of_ranks):
            _refuse_differing_state(self.collectives, what, self._digests)
        if any(each[2:] != of_ranks[0][2:] for each in of_ranks):
            self._drifted = drifted_variables(
                self.collectives, what, tree.variables, self._mirrored, drift
            )
        self._is_parallel = parallel

    def _check(self, root: Trackable, replaces: Replaces, drift: str) -> tuple[str, str, str]:
        """Take the states of objects, and return the digests of all paths, states and values."""
        _check_savable(self._tree)
        if self.writes_here and self.collectives.rank == 0:
            check_may_replace(self.path, replaces)
        if self._tree.stateful:
            assign_replicas(self._tree.stateful.values(), self.collectives.layout)
        if self.collectives.rank == 0:  # expect_partial() may have been called there alone
            check_nothing_waits(self._what, root, self._tree)
        self._digests: dict[str, str] = {}
        is_compared = self.collectives.size > 1
        for name, each in self._tree.stateful.items():
            if isinstance(each, PerReplicaState):
                self._of_replicas[name] = each._own_states(name)
                continue
            state = self._states[name] = split_object(each, name)
            self._check_shards(name, state)
            if _is_mirrored(each):
                self._keys[name] = each.mirrored_keys(state[1])
            if is_compared:
                self._digests[name] = _digest_of_state(state, with_values=not _is_mirrored(each))
        for name, variable in self._tree.variables.items():
            if is_compared and not isinstance(variable, WrittenTogether | SyncOnReadVariable):
                self._digests[name] = f"{digest_of(variable._storage):016x}"
        # Kept apart from `_digests`: a difference there refuses the save, while `drift` may ask
        # only for a warning here.
        if is_compared and drift != "ignore":
            self._mirrored = mirrored_digests(self._tree.variables)
            self._mirrored |= tensor_digests(self._states, self._keys)
        groups = self._tree.paths(), self._digests.values(), self._mirrored.values()
        paths, states, mirrored = map(_digest_of_texts, groups)
        return paths, states, mirrored

    def _check_shards(self, name: str, state: SplitState) -> None:
        rank, size = self.collectives.rank, self.collectives.size
        for key, array in state[1].items():
            if isinstance(array, np.ndarray):
                continue
            is_kept = self._keeps_shards and array.mesh
            if rank == 0 and not array.is_here and not is_kept:
                raise ContextError(
                    f"{self._what}: {f'{name}/{key}'!r} is a DTensor of which rank 0 has no part, "
                    "so it cannot be gathered there. Save it with Checkpoint.write, or with "
                    "CheckpointManager(..., asynchronous=False)."
                )
            if (num_ranks := array.num_ranks) > size:
                raise ContextError(
                    f"{self._what}: {f'{name}/{key}'!r} is a DTensor of {num_ranks} ranks, but "
                    f"{size} take part in this save. Call mpistrat.torch.init() before the mesh is "
                    "made, or save in the scope of a strategy over the ranks of the mesh."
                )

    def header(self, step: int, created_s: float | None = None) -> Header:
        """Return the attributes of the root group."""
        created = "" if created_s is None else Header.timestamp(created_s)
        return Header(
            step=step,
            num_replicas=self.collectives.layout.num_replicas,
            mpi_library=self.collectives.channel.transport.library,
            created=created,
            arithmetic=self.collectives.arithmetic,
        )

    def items(self) -> Iterator[Item]:
        """Yield all that goes into the file, in step on all ranks. **Collective**.

        One variable at a time comes to rank 0, so drop each item before the next one.
        """
        # In the same order on every rank, which the constructor has compared: most items are
        # collective.
        for name, variable in self._tree.variables.items():
            if variable._placement.is_in_parts and self._keeps_parts(variable):
                yield _item_of_parts(name, variable, self._is_parallel)
            else:
                yield _item_of(name, variable, name in self._drifted)
            if isinstance(variable, SyncOnReadVariable) and variable._saves_components:
                yield replicas_item(name, variable._components_for_root())
        for name, state in self._states.items():
            yield from self._items_of_state(name, state)
        for name, own in self._of_replicas.items():
            join = gather_states(self.collectives, self._what, name, own)
            items: list[Item] = []
            # `join` is there only on rank 0, and calls code of the user. Its outcome is shared
            # before the next collective, which the others would otherwise reach without rank 0.
            with self.collectives.common_outcome(self._what, name):
                if join is not None:
                    items += self._items_of_state(name, split_state(join(), name))
            yield from items

    def _keeps_parts(self, variable: Variable) -> bool:
        """Return whether rank 0 need not have all parts of a variable at once."""
        num_bytes = math.prod(variable.full_shape) * variable.dtype.itemsize
        return self._keeps_shards and num_bytes > BYTES_PER_PIECE

    def _items_of_state(self, name: str, state: SplitState) -> Iterator[Item]:
        rest, arrays = state
        yield state_item(name, rest, list(arrays))
        mirrored = self._keys.get(name, ())
        for key, array in arrays.items():
            path = f"{name}/{key}"
            if isinstance(array, np.ndarray):
                yield variable_item(path, array)
            elif self._keeps_shards and array.mesh:
                yield _sharded_item(path, array)
            elif array.num_ranks:
                item = _item_of_tensor(path, array, BufferLifetime.BRIEF)
                yield item if self.collectives.rank == 0 else replace(item, array=None)
                del item  # the whole of it, on every rank
            elif self._is_parallel and key in mirrored and path not in self._drifted:
                yield _item_of_tensor(path, array, BufferLifetime.EVERYWHERE)
            elif self.collectives.rank == 0:
                # A view shows memory of the tensor, which stays. A copy belongs to this item, and
                # goes with it.
                life = BufferLifetime.LONG if array.is_view else BufferLifetime.BRIEF
                yield _item_of_tensor(path, array, life)


@functools.cache
def _warn_of_root(what: str) -> None:
    _logger.warning(
        "%s outside of any strategy writes on rank 0 alone, because all ranks would write the same "
        "file, and the other ranks do not wait for it. Call it in the scope of a strategy, where "
        "they wait, and which checks that the ranks agree. For a file of each rank use "
        "MPIStrategy(comm=MPI.COMM_SELF).",
        what,
    )


def _item_of(name: str, variable: Variable, has_drifted: bool) -> Item:
    """Bring the values of one variable to rank 0. **Collective**."""
    value = variable._save_value()
    placement = variable._placement
    # The value is either the storage of the variable itself, which stays until the end of the save,
    # or an array that was created for this call.
    is_kept = placement.is_here and value is variable._storage
    life = BufferLifetime.LONG if is_kept else BufferLifetime.BRIEF
    is_whole = isinstance(variable, MirroredVariable) and not placement.is_in_parts
    if is_whole and not has_drifted:
        life = BufferLifetime.EVERYWHERE
    return replace(_described(name, variable, value), life=life)


def _described(name: str, variable: Variable, value: Array | None) -> Item:
    return variable_item(
        name,
        value,
        synchronization=variable.synchronization.name,
        aggregation=variable.aggregation.name,
        trainable=variable.trainable,
    )


def _item_of_parts(name: str, variable: Any, is_parallel: bool) -> Item:
    """Return an item whose values each rank writes, or which come to rank 0 in pieces."""
    # It has the shape and dtype of the whole variable and no memory for it: all elements are the
    # same zero, with strides of 0.
    blank = np.broadcast_to(np.zeros((), variable.dtype), variable.full_shape)
    item = _described(name, variable, blank)
    block = variable._placement.block
    if is_parallel and block is not None and isinstance(variable, WrittenTogether):
        return replace(item, tensor=_OwnBlock(variable, block))
    return replace(item, pieces=variable._pieces_for_root())


class _OwnBlock:
    """What this rank stores of a variable, as `ShardedWriting` takes it."""

    is_view = True
    is_here = True

    def __init__(self, variable: Variable, block: Block) -> None:
        self._variable, self._block = variable, block
        self.shape, self.dtype = block.shape, variable.dtype
        self.size = math.prod(block.shape)
        self.tensor_dtype = variable.dtype.name
        self.num_ranks = variable._placement.num_holders
        self.mesh = f"{self.num_ranks} parts"

    def shards(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the elements that this rank saves, and where they lie."""
        if self._variable._placement.saves_own:
            yield Box(self._block.offsets, self._block.sizes), host_view(self._variable.part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise NotImplementedError  # no rank has all of it


def _is_mirrored(stateful: object) -> TypeGuard[TensorState]:
    return isinstance(stateful, TensorState) and stateful.is_mirrored


def _item_of_tensor(path: str, array: TensorArray, life: BufferLifetime) -> Item:
    stored, own = array.dtype.name, array.tensor_dtype
    return variable_item(
        path, np.asarray(array), tensor_dtype="" if stored == own else own, life=life
    )


def _sharded_item(path: str, array: TensorArray) -> Item:
    blank = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    stored, own = array.dtype.name, array.tensor_dtype
    item = variable_item(path, blank, tensor_dtype="" if stored == own else own)
    return replace(item, tensor=array)


def _check_savable(tree: Tree) -> None:
    if tree.empty:
        raise TypeError(
            f"A checkpoint found nothing to save in {', '.join(map(repr, tree.empty))}: such "
            "objects need variables among their attributes, or state_dict() and "
            "load_state_dict()."
        )
    for name, variable in tree.variables.items():
        if not is_storable(variable.dtype):
            raise TypeError(
                f"A checkpoint cannot save the variable {name!r}: HDF5 has no type for its dtype "
                f"{variable.dtype}. Keep a float32 variable beside it, and save that."
            )


def _refuse_differing(collectives: Collectives, what: str, path: str, tree: Tree) -> None:
    """Raise on every rank how the objects of the first rank that differs do. **Collective**."""
    own = tree.paths()
    first = collectives.broadcast_json(own)
    with collectives.common_outcome(what, path):
        if own != first:
            differing = sorted(set(own) ^ set(first)) or "only in their order"
            raise ValueError(
                f"{what}: the objects on rank {collectives.rank} of {collectives.size} differ from "
                f"those on rank 0: {differing}. Every rank must save the same objects in the same "
                "order."
            )


def _refuse_differing_state(
    collectives: Collectives, what: str, digests: Mapping[str, str]
) -> None:
    """Raise on every rank which state is not equal on all of them. **Collective**."""
    of_ranks = collectives.gather_json(digests, what)
    lines = []
    for name, digest in of_ranks[0].items():
        others = [rank for rank, each in enumerate(of_ranks) if each[name] != digest]
        if others:
            lines.append(f"  {name}: differs between rank 0 and {rank_list(others)}")
    raise CheckpointError(
        f"{what}: state that differs between ranks cannot be saved as one:\n"
        + "\n".join(lines)
        + "\nWrap each of these as ms.PerReplicaState(obj) to save all of them, or make them "
        "equal. Random numbers from ms.get_replica_context().rng(...) have no state to save."
    )


def _digest_of_state(state: SplitState, with_values: bool) -> str:
    """Return the digest of one object's state, whatever the order of the keys in its dicts."""
    rest, arrays = state
    digests = [digest_of_text(json.dumps(marked(rest), sort_keys=True).encode())]
    for key, array in sorted(arrays.items()):
        # A sharded tensor has different elements on each rank by design: only its key, dtype and
        # shape count.
        is_whole = isinstance(array, np.ndarray) or not array.num_ranks
        is_compared = with_values and is_whole
        digest = f"{digest_of_values(np.asarray(array)):016x}" if is_compared else ""
        digests.append(f"{key} {array.dtype} {array.shape} {digest or is_whole}")
    return _digest_of_texts(digests)


def _digest_of_texts(texts: Iterable[str]) -> str:
    # Separated, or the texts "ab", "c" and "a", "bc" would have the same digest.
    return digest_of_text("\0".join(texts).encode())
