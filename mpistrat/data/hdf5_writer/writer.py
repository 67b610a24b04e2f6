"""`HDF5Writer`: one plain HDF5 file that all ranks write."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mpistrat import context
from mpistrat.arguments import as_bool, as_integer
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.data.hdf5_writer.dataset_spec import (
    canonical,
)
from mpistrat.data.hdf5_writer.definitions import Definitions, attribute_names
from mpistrat.data.hdf5_writer.session import Session
from mpistrat.data.hdf5_writer.steps import Steps
from mpistrat.errors import ContextError, DataError
from mpistrat.layout import Layout
from mpistrat.mpi.launcher import is_one_of_several


class HDF5Writer:
    """Writes one plain HDF5 file from all ranks. **Collective**: all ranks call all its methods.

    Parameters
    ----------
    path : path
        The file, the same on all ranks. Missing folders are created.
    mode : str
        ``"w"`` writes a new file, which replaces an existing one when it is closed. ``"a"``
        extends the file in place: it is created if absent, and otherwise resumed. In this mode,
        the file is valid after every step, even if the job is killed.
    attrs : mapping, optional
        Attributes of the root group.
    compression, shuffle : optional
        Defaults for `create_dataset` without `data`.
    durable : bool
        Whether each commit is flushed to disk, so that it survives a power failure. Otherwise
        steps survive the death of processes, and `flush`, `close` and checkpoints bring them to
        disk.
    steps_per_commit : int
        How many steps are committed together.
    strategy : Strategy, optional
        The strategy whose ranks write. Default: the current one, else this process alone.

    Raises
    ------
    ValueError
        If `mode` is not ``"w"`` or ``"a"``.
    OSError
        On every rank, if the file cannot be created or opened, or has another writer.
    DataError
        On every rank, if the existing file is not HDF5, or another program (SWMR) left it
        marked as open.
    ContextError
        Inside ``strategy.run``, or outside of any strategy in a job of several ranks.
    NotImplementedError
        Under a parameter server or an elastic strategy.

    Examples
    --------
    >>> with ms.data.HDF5Writer("run.h5", "a", attrs={"title": "heat"}, strategy=strategy) as out:
    ...     for step in range(out.steps, 3):
    ...         out.append({"time": 0.5 * step, "u": strategy.run(lambda: np.ones((2, 4)))})
    ...     out.steps, out.rows["time"]
    (3, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "w",
        *,
        attrs: Mapping[str, Any] | None = None,
        compression: Any = None,
        shuffle: bool = False,
        durable: bool = False,
        steps_per_commit: int = 1,
        strategy: Any = None,
    ) -> None:
        self._session: Session | None = None
        self._strategy, ranks = _ranks_of(strategy)
        self._layout = Layout() if self._strategy is None else context.layout_of(self._strategy)
        with ranks.call("HDF5Writer") as call:
            self._require_cross_replica("HDF5Writer")
            if mode not in ("w", "a"):
                raise ValueError(
                    f'HDF5Writer: mode must be "w" for a new file or "a" to append, not {mode!r}.'
                )
            self._path, self._mode = os.fspath(path), mode
            if not isinstance(self._path, str):
                raise TypeError(f"HDF5Writer: path must be a str or Path, not {path!r}.")
            self._defaults = {
                "compression": compression,
                "shuffle": as_bool("HDF5Writer: shuffle", shuffle),
            }
            durable = as_bool("HDF5Writer: durable", durable)
            self._per_commit = as_integer("HDF5Writer: steps_per_commit", steps_per_commit, 1)
            names = attribute_names("HDF5Writer", attrs)
            call.agree(
                self._path, mode, repr(compression), shuffle, durable, steps_per_commit, names
            )
        self._ranks = ranks
        self._session = Session(ranks, "HDF5Writer", self._path, mode, durable)
        self._definitions = Definitions(self._session, self._require_cross_replica, self._defaults)
        self._steps = Steps(
            self._session,
            self._require_cross_replica,
            self._defaults,
            self._layout,
            self._per_commit,
        )
        self._ended: tuple[int, dict[str, int]] = (0, {})
        if attrs:
            self.set_attrs("/", attrs)

    # Properties

    @property
    def path(self) -> str:
        """The path as it was passed. **Local**."""
        return self._path

    @property
    def mode(self) -> str:
        """``"w"`` or ``"a"``. **Local**."""
        return self._mode

    @property
    def closed(self) -> bool:
        """Whether the writer was closed. **Local**."""
        return self._session is None

    @property
    def steps(self) -> int:
        """Number of steps in the file; in mode ``"w"``, of all steps so far. **Local**."""
        session = self._session
        if session is None:
            return self._ended[0]
        waiting = session.num_waiting if self._mode == "w" else 0
        return session.steps + waiting

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows in the file of each dataset that grows, by name. **Local**."""
        session = self._session
        if session is None:
            return dict(self._ended[1])
        return {
            name: each.rows if self._mode == "w" else session.committed_rows[name]
            for name, each in sorted(session.datasets.items())
            if each.grows
        }

    # Definitions

    def create_group(self, name: str, attrs: Mapping[str, Any] | None = None) -> None:
        """Create a group, and the groups around it, unless they exist. **Collective**.

        Parameters
        ----------
        name : str
            Path of the group. Paths of datasets create their groups too.
        attrs : mapping, optional
            Attributes of the group.

        Raises
        ------
        DataError
            If there is a dataset of this name.
        """
        self._open("create_group")
        self._definitions.create_group(name, attrs)

    def create_dataset(
        self,
        name: str,
        shape: Any = None,
        dtype: Any = None,
        *,
        data: Any = None,
        chunks: Any = None,
        compression: Any = None,
        compression_opts: Any = None,
        shuffle: bool = False,
        fletcher32: bool = False,
        fillvalue: Any = None,
        split_axis: int = 0,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a dataset, with the words and defaults of h5py. **Collective**.

        In a file that is resumed, a dataset that exists is checked instead.

        Parameters
        ----------
        name : str
            Path of the dataset.
        shape : tuple
            Its shape. If ``shape[0]`` is ``None``, it grows by `append`. Otherwise `write` fills
            it in mode ``"w"``; in mode ``"a"`` pass `data`, or it keeps the fill value.
        dtype : dtype
            Its dtype, by default float32 as in h5py.
        data : array, optional
            Values of any type that h5py accepts. Rank 0 writes its own; the others are ignored.
        chunks : tuple or bool, optional
            Its chunk shape. The default depends only on shape and dtype.
        compression, compression_opts, shuffle, fletcher32, fillvalue
            As in h5py; ``**hdf5plugin.LZ4()`` works.
        split_axis : int
            With k > 0, a step is one row, and the parts of the replicas (which do not have the
            first axis) are joined along axis k of the dataset. With 0, parts are rows.
        attrs : mapping, optional
            Attributes of the dataset, from rank 0.

        Raises
        ------
        DataError
            If the file has a dataset of this name with a different shape or dtype, if steps have
            been written and it has none, or if only HDF5 can apply a filter.
        TypeError, ValueError
            As from h5py.
        """
        self._open("create_dataset")
        self._definitions.create_dataset(
            name,
            shape,
            dtype,
            data,
            split_axis,
            attrs,
            chunks=chunks,
            compression=compression,
            compression_opts=compression_opts,
            shuffle=shuffle,
            fletcher32=fletcher32,
            fillvalue=fillvalue,
        )

    def set_attrs(self, name: str, attrs: Mapping[str, Any]) -> None:
        """Set attributes of a group or dataset, from rank 0. **Collective**.

        Readers see them with the next commit.

        Parameters
        ----------
        name : str
            Path of the object; ``"/"`` is the root group.
        attrs : mapping
            Values that h5py can store as attributes.

        Raises
        ------
        KeyError
            If there is no such object.
        TypeError
            On every rank, if h5py cannot store a value.
        """
        self._open("set_attrs")
        self._definitions.set_attrs(name, attrs)

    # Rows

    def append(self, step: Mapping[str, Any]) -> None:
        """Add one step to the datasets that grow. **Collective**.

        Once it has returned on any rank, the step is in the file, in all its datasets, for every
        reader that opens it from then on; with ``steps_per_commit=n`` after every n-th step. In
        mode ``"w"`` the file appears with `close`.

        Parameters
        ----------
        step : dict
            Values by the name of their dataset; nested dicts are groups. An array with one axis or
            more, or a `PerReplica` of one, is this replica's part: rows of shape
            ``(n, *row.shape)``, joined in the order of the replicas, n may be 0. With `split_axis`
            it is a part of one row. A number, an array without axes or a `Mirrored` value is one
            row, the same on all ranks. The first step creates the datasets that do not exist.

        Raises
        ------
        DataError
            If shape, dtype or names do not fit. Nothing is written then. The writer stays usable if
            every rank raises; otherwise the others raise CollectiveMismatchError.
        TypeError, ValueError
            If a value is not an array, or with ``num_replicas=`` has no component per replica.
        CollectiveMismatchError
            If the ranks pass different names, or different values for a row that all share.
        OSError
            On every rank, if the file cannot be written. It stays at its last step. In mode
            ``"w"``, the new file is removed, and must be written again from the start.
        """
        self._open("append")
        self._steps.append(step)

    def write(self, values: Mapping[str, Any], at: Any = None) -> None:
        """Write rows or boxes of datasets of fixed size. **Collective**, only in mode ``"w"``.

        Every element is written exactly once.

        Parameters
        ----------
        values : dict
            Values by the name of their dataset, as for `append`.
        at : optional
            Where they belong: ``None`` if the parts, in the order of the replicas, are all rows; a
            slice; row numbers, as an array of integers or a `PerReplica` of one; a tuple of slices
            with step 1, which is a box; or a dict from names to one of these.

        Raises
        ------
        IndexError
            If rows are out of range.
        DataError
            If shape or dtype do not fit, or rows are written twice.
        ValueError
            In mode ``"a"``.
        """
        self._open("write")
        self._steps.write(values, at)

    # Commits

    def flush(self) -> None:
        """Commit all steps and attributes, and bring them to disk. **Collective**.

        In mode ``"w"`` the ranks only wait for each other: nothing is safe before `close`.

        Raises
        ------
        OSError
            On every rank, if that fails.
        """
        self._flush("HDF5Writer.flush")

    def _flush(self, kind: str) -> None:
        session = self._open_session(kind)
        with self._ranks.call(kind) as call:
            self._require_cross_replica(kind)
            call.agree()
        if self._mode == "w":
            return
        if session.must_commit:
            session.commit(kind, flush=True)
        with session.outcome(kind):
            os.fsync(session.handle)

    def close(self) -> None:
        """Flush, and end writing; a second call does nothing. **Collective**.

        In mode ``"w"``, the complete file then gets its name.

        Raises
        ------
        DataError
            In mode ``"w"``, if some rows of a dataset of fixed size were never written. The file
            that was there before stays.
        OSError
            On every rank, if the file cannot be written.
        """
        kind = "HDF5Writer.close"
        session = self._session
        if session is None:
            return
        try:
            self._open_session(kind)
            with self._ranks.call(kind) as call:
                self._require_cross_replica(kind)
                call.agree()
            if self._mode == "w":
                self._check_complete(kind)
            if self._mode == "w" or session.must_commit:
                session.commit(kind, flush=True)
            ended = self.steps, self.rows
            session.finish(kind)
            self._ended = ended
        except BaseException:
            self._ended = self.steps, self.rows
            session.abandon()
            raise
        finally:
            self._session = None

    def _check_complete(self, kind: str) -> None:
        session = self._open_session(kind)
        fixed = [each for each in session.datasets.values() if not each.grows]
        # Each rank knows only the chunks that it owns, so every rank must report.
        found = self._ranks.gather_json([session.missing(each) for each in fixed], kind)
        for number, dataset in enumerate(fixed):
            rows = [of_rank[number] for of_rank in found if of_rank[number] is not None]
            if rows:
                raise DataError(
                    f"{kind}: row {min(rows)} of dataset {dataset.name!r} was never written, or "
                    "not completely. All rows must be written before the file is closed."
                )

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the number of steps and rows, for checkpoints. **Collective**.

        Returns
        -------
        dict
            ``{"steps": int, "rows": {name: int}}``.

        Raises
        ------
        ValueError
            In mode ``"w"``, whose file cannot be resumed.
        """
        kind = "HDF5Writer.state_dict"
        self._open_session(kind)
        if self._mode == "w":
            raise ValueError(f'{kind} needs the mode "a".')
        # No checkpoint may know of steps that the file could still lose.
        self._flush(kind)
        return {"steps": self.steps, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the file back to the step of a state, in one commit. **Collective**.

        Parameters
        ----------
        state : dict
            What `state_dict` has returned.

        Raises
        ------
        DataError
            If the file has fewer steps or rows than the state. Nothing is changed then.
        ValueError
            In mode ``"w"``.
        """
        kind = "HDF5Writer.load_state_dict"
        session = self._open_session(kind)
        with self._ranks.call(kind) as call:
            self._require_cross_replica(kind)
            if self._mode == "w":
                raise ValueError(f'{kind} needs the mode "a".')
            steps = as_integer(f"{kind}: steps", state["steps"], 0)
            rows = {
                canonical(kind, name): as_integer(f"{kind}: rows of {name!r}", number, 0)
                for name, number in state["rows"].items()
            }
            own = self.rows
            short = [n for n, number in sorted(rows.items()) if own.get(n, 0) < number]
            if session.steps < steps or short:
                which = f", and too few rows of {', '.join(short)}" if short else ""
                raise DataError(
                    f"{kind}: the file {self._path} has {session.steps} steps, but the state has "
                    f"{steps}{which}. It belongs to a different file, or the file was replaced."
                )
            call.agree(steps, tuple(sorted(rows.items())))
        # Steps that wait for a commit are later than the state, and `cut` would commit them.
        session.undo()
        rows = {name: rows.get(name, 0) for name in own}
        if (steps, rows) != (session.steps, own):
            session.cut(kind, steps, rows)

    # Context manager

    def __enter__(self) -> HDF5Writer:
        self._open_session("HDF5Writer.__enter__")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._session is not None:
            # Without a collective: the error may have been raised on only this rank.
            self._ended = self.steps, self.rows
            self._session.abandon()
            self._session = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.steps} steps"
        return f"HDF5Writer({self._path!r}, {self._mode!r}, {state})"

    # Help

    def _open(self, method: str) -> None:
        self._open_session(f"HDF5Writer.{method}")

    def _open_session(self, kind: str) -> Session:
        if self._session is None:
            raise ValueError(f"{kind}: the writer of {self._path} is closed.")
        if self._session.is_lost:
            raise OSError(
                errno.EIO,
                f"{kind}: an earlier step could not be written, so the new file was removed, and "
                "what stood there stays. Write all steps again with a new HDF5Writer",
                self._path,
            )
        return self._session

    def _require_cross_replica(self, kind: str) -> None:
        if self._strategy is not None:
            context.require_cross_replica(self._strategy, kind)


def _ranks_of(strategy: Any) -> tuple[Any, Collectives]:
    """Return the strategy, ``None`` for one process, and its ranks."""
    if strategy is None:
        frame = context.current()
        if frame is not None and not context.is_default(frame.strategy):
            strategy = frame.strategy
    if strategy is None:
        opened = map(context.collectives_of, context.open_strategies())
        if is_one_of_several() or any(ranks.size > 1 for ranks in opened):
            raise ContextError(
                "HDF5Writer was called outside of any strategy in a job of several ranks, which "
                "would all write the same file. Pass strategy=strategy, or call it inside "
                '"with strategy.scope():".'
            )
        return None, Collectives.solo(Device("cpu"))
    if context.is_remote(strategy):
        raise NotImplementedError("HDF5Writer cannot be used under a parameter server.")
    ranks = context.collectives_of(strategy)
    if ranks.is_elastic:
        raise NotImplementedError(
            "HDF5Writer cannot be used with elastic=True, whose calls are repeated after a loss."
        )
    return strategy, ranks
