"""State of an open output file on all ranks: moving rows, writing chunks, committing steps."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mpistrat import hdf5
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.data.hdf5_writer.chunk_store import (
    ChunkStore,
    Encoded,
    SharedSpace,
    entries_of,
    first_page,
)
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset, existing_dataset
from mpistrat.data.hdf5_writer.direct_rows import DirectRows, Entries
from mpistrat.data.hdf5_writer.encoders import isal_version
from mpistrat.data.hdf5_writer.exchange import PlacedPart, exchange_round, pieces_of
from mpistrat.data.hdf5_writer.geometry import Piece
from mpistrat.data.hdf5_writer.header_copy import Changes, growing_datasets
from mpistrat.data.hdf5_writer.target import Target, naming, objects_of, open_same
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div
from mpistrat.system.files import begin_to_flush

_FLUSH_BYTES = 2**23


class Session:
    """An open file. All methods are **Collective**, except those that say otherwise."""

    def __init__(self, ranks: Collectives, kind: str, path: str, mode: str, durable: bool) -> None:
        self.ranks = ranks
        self.path = path
        self.mode = mode
        self.durable = durable
        self.target: Target | None = None
        """Only on rank 0."""
        self.handle = -1
        self.steps = 0
        self.datasets: dict[str, OutputDataset] = {}
        """The datasets that are written in chunks."""
        self.committed_rows: dict[str, int] = {}
        self.changes = Changes()
        self.is_changed = False
        """Whether rank 0 has `changes`."""
        self.is_stale = False
        """Whether the next commit must write chunks without new rows: see `OpenChunk`."""
        self.num_waiting = 0
        """Number of steps that are not committed."""
        self.known_objects: dict[str, tuple[Any, Any] | None] = {}
        """Shape and dtype of each dataset by path, ``None`` for groups, committed or not."""
        self.created_names: set[str] = set()
        """Paths of the objects that this writer has created, which cannot be created again."""
        self.is_lost = False
        """Whether a step of a file with mode "w" could not be written, so that it was removed."""
        self._added: dict[str, Any] = {}
        self._pages: dict[int, tuple[int, int, int]] = {}
        """On several nodes, for each rank a part of its new bytes: place, length and digest."""
        self._addresses: dict[str, int] = {}
        """Addresses of contiguous datasets."""
        # Rank 0 first: it takes the lock, and shows that the file is one that can be resumed.
        ranks.on_root(self._named(lambda: self._open_root(path, mode, durable)), kind)
        try:
            # In mode "w" the file has a temporary name, which only rank 0 knows.
            name, inode, end, self.steps, self.is_stale = ranks.on_root(self._described, kind)
            with self.outcome(kind):
                self.handle = open_same(name, inode)
            # With different compressors, the stored bytes of a chunk would depend on its owner, and
            # so on the number of ranks.
            facts = ranks.gather_json([isal_version(), socket.gethostname()], kind)
            versions = [version for version, _ in facts]
            self.is_on_several_hosts = len({host for _, host in facts}) > 1
            self.fast_gzip = versions[0] is not None and len(set(versions)) == 1
            self.name = name
            self.space = SharedSpace(end, ranks.size)
            self._flushed_end = end
            # A file that grows may be read already, so its new pages must stay in memory.
            early = mode == "w"
            self.store = ChunkStore(os.path.dirname(name), ranks.rank, ranks.size, early)
            self.direct = DirectRows(
                self.store, self.space, self._addresses, self._is_on_one_node, early
            )
            with self.outcome(kind):
                self._read_existing(None)
        except BaseException:
            self.abandon()
            raise

    @contextlib.contextmanager
    def outcome(self, kind: str) -> Iterator[None]:
        """Let the body fail on all ranks if it fails on any, with errors that name the file."""
        with self.ranks.common_outcome(kind), naming(self.path):
            yield

    def _named(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return naming(self.path)(work)

    def _open_root(self, path: str, mode: str, durable: bool) -> None:
        target = Target(path, mode, durable)
        target.inspect()
        self.target = target

    @property
    def must_commit(self) -> bool:
        """Whether the file lacks steps or changes, or has rows that no commit shows. Local."""
        return bool(self.num_waiting) or self.is_changed or self.is_stale

    def _described(self) -> tuple[str, int, int, int, bool]:
        assert self.target is not None
        target = self.target
        inode = os.fstat(target.file.handle).st_ino
        return target.name, inode, target.end, target.steps, target.file.was_killed

    def _read_existing(self, rows: dict[str, int] | None) -> None:
        """Take over the growing datasets of the file, with fewer rows if `rows` says so. Local."""
        with contextlib.closing(hdf5.open_for_reading(self.name, DataError)) as file:
            self.known_objects = objects_of(file)
            for name, stored in growing_datasets(file).items():
                if stored.dtype.hasobject:
                    continue  # it stays as it is
                dataset = self.datasets.get(name)
                if dataset is None:
                    try:
                        dataset = existing_dataset(name, stored, self.fast_gzip)
                    except DataError:
                        continue  # only HDF5 can write it
                if rows is not None:
                    dataset.rows = rows.get(name, 0)
                self.datasets[name] = dataset
                self.committed_rows[name] = dataset.rows
                self.store.add(dataset)
                self.direct.forget(name)
                # A killed writer may have written rows of a step that it did not commit, and a file
                # that is cut back has rows of later steps.
                is_stale = rows is not None or (self.is_stale and not dataset.is_filtered)
                self.store.fill_last(dataset, stored, is_stale)
                if self.target is not None:
                    self.target.file.know(dataset, stored)

    # Definitions

    def add(self, dataset: OutputDataset) -> None:
        """Accept rows of a new dataset. Local, on all ranks."""
        self.datasets[dataset.name] = dataset
        self.known_objects[dataset.name] = dataset.shape, dataset.dtype
        self.committed_rows[dataset.name] = 0
        self.store.add(dataset)
        self.is_changed = True
        address = None
        if not dataset.is_chunked:
            num_bytes = dataset.num_rows * dataset.chunk_bytes // dataset.geometry.chunk[0]
            address = self._addresses[dataset.name] = self.space.reserve(num_bytes)
        if self.target is not None:
            self.changes.datasets[dataset.name] = dataset
            self.target.file.add(dataset, address)

    def note_groups(self, name: str) -> None:
        """Remember a new object and the groups around it. Local, on all ranks."""
        self.created_names.add(name)
        parts = name.split("/")
        for number in range(1, len(parts)):
            self.known_objects.setdefault("/".join(parts[:number]), None)

    def forget(self, name: str) -> None:
        """Undo `add` for a dataset that the first step has created. Local, on all ranks."""
        del self.datasets[name], self.known_objects[name], self.committed_rows[name]
        self.store.remove(name)
        self.direct.forget(name)
        if self.target is not None:
            self.changes.datasets.pop(name, None)
            self.target.file.remove(name)

    # Rows

    def move(
        self, kind: str, call: CollectiveCall, parts: Iterable[PlacedPart], is_sent: bool
    ) -> Mover:
        """Begin to send the rows of `parts` to the owners of their chunks; inside `call`.

        If `is_sent` is false, all ranks hold all these rows, and each keeps those that it owns.
        """
        mover = Mover(self, kind, parts)
        if is_sent:
            mover.round(call)
        else:
            mover.take_all()
        return mover

    def add_chunks(self, entries: Entries) -> None:
        """Let the next commit name chunks that were written. Local."""
        for name, found in entries.items():
            self._added.setdefault(name, {}).update(found)

    def missing(self, dataset: OutputDataset) -> int | None:
        """Return the first row that this rank lacks of a dataset of fixed size, if any. Local."""
        where = self.direct if self.direct.knows_rows(dataset) else self.store
        return where.missing(dataset)

    def store_chunks(self, kind: str, is_commit: bool, flush: bool = False) -> None:
        """Write all chunks that are complete; with `is_commit` also the last ones."""
        encoded: list[Encoded] = []

        def encode() -> dict[str, Any]:
            self.direct.write(self.handle)
            encoded.extend(self.store.full())
            if is_commit:
                encoded.extend(self.store.partial())
            self.store.place_contiguous(self._addresses, encoded)
            arena = 0
            if is_commit and self.target is not None:
                arena = self.target.file.prepare(self._counts(), self.space.end)
            page = first_page(encoded) if self.is_on_several_hosts else None
            return {"chunks": [each.as_json() for each in encoded], "arena": arena, "page": page}

        # On one node, rank 0 flushes for all: the kernel knows what any process has written.
        is_flushing = flush and not self._is_on_one_node
        reports = self._reports(kind, self._named(encode))
        chunks, arena = [each["chunks"] for each in reports], reports[0]["arena"]
        if any(chunks):
            addresses = self.space.place_chunks(chunks)
            with self.outcome(kind):
                self.store.write(self.handle, encoded, addresses[self.ranks.rank])
                # Each rank flushes what it has written, before rank 0 commits: on several nodes,
                # rank 0 cannot flush the pages of a different node, nor see them before.
                if is_flushing or self.is_on_several_hosts:
                    os.fsync(self.handle)
            for rank, report in enumerate(reports):
                if report["page"]:
                    offset, *page = report["page"]
                    self._pages[rank] = addresses[rank][0] + offset, *page
            entries = entries_of(self.datasets, chunks, addresses)
            self.add_chunks(entries)
            for name, found in entries.items():
                for each, (entry, _) in found.items():
                    self.direct.note_chunk(self.datasets[name], each, entry.address)
            self.store.release_full()
        elif is_flushing:
            with self.outcome(kind):
                os.fsync(self.handle)
        # All chunks of all ranks are written here, which the round above has shown.
        if is_commit:
            self._commit_on_root(kind, arena, flush and not (is_flushing or self.durable))

    def _commit_on_root(self, kind: str, arena: int, flush: bool) -> None:
        place = self.space.reserve(arena)
        with self.outcome(kind):
            if self.target is not None:
                if flush:
                    os.fsync(self.handle)
                self._commit(place, arena)
            # While rank 0 commits, another rank has time.
            if self.ranks.rank == self.ranks.size - 1 and self._is_on_one_node:
                self._flush_early()

    def _flush_early(self) -> None:
        """Let the disk write what was added, so that `flush` and `close` take less time. Local."""
        end = self.space.end
        if not self.durable and end - self._flushed_end >= _FLUSH_BYTES:
            begin_to_flush(self.handle, self._flushed_end, end - self._flushed_end)
            self._flushed_end = end

    def can_write_ahead(self, datasets: Mapping[str, OutputDataset]) -> bool:
        """Return whether rows of these datasets are all that the next commit writes. Local."""
        is_clean = not (self.is_changed or self.num_waiting or self.is_stale)
        return is_clean and all(self.direct.takes_steps(each) for each in datasets.values())

    def write_ahead(self) -> int:
        """Write rows that wait, and return how many bytes rank 0 needs to commit them. Local."""
        self.direct.write(self.handle)
        if self.target is None:
            return 0
        return self.target.file.prepare(self._counts(), self.space.end)

    def drop_ahead(self, end: int) -> None:
        """Forget what `write_ahead` has written; the file was used up to `end`. Local."""
        self.undo()
        self.space.end = end

    def commit_written(self, kind: str, arena: int) -> None:
        """Make rows a part of the file that all ranks have written ahead."""
        with self.undone_if_failed():
            self._commit_on_root(kind, arena, False)
        self._note_commit()

    @property
    def _is_on_one_node(self) -> bool:
        """Whether all ranks are known to share memory, and so the cache of the file system."""
        piggyback = self.ranks.channel.transport.piggyback
        return self.ranks.size == 1 or (piggyback is not None and piggyback.is_shared)

    def _reports(self, kind: str, encode: Callable[[], dict[str, Any]]) -> list[Any]:
        """Return the result of `encode` on each rank, or raise on all if it fails on any."""
        # Mostly with the agreement, where `on_all` needs two more messages.
        if self.ranks.size == 1:
            return [encode()]
        own: dict[str, Any] | None = None
        error: Exception | None = None
        try:
            own = encode()
        except Exception as raised:
            # The others wait for this rank's report in any case. An empty one lets all go to
            # `again`, which raises the error.
            error = raised
        text = b"" if own is None else json.dumps(own, separators=(",", ":")).encode()
        with self.ranks.call(kind) as call:
            texts = call.agree_with(call.signature("chunks"), text)
        if all(texts):
            return [parsed_report(each) for each in texts]

        def again() -> Any:
            if error is not None:
                raise error
            return own

        return self.ranks.on_all(again, kind)

    def has_full_blocks(self) -> bool:
        """Return whether some chunks are complete since the last commit. Local, on all ranks."""
        return any(
            dataset.rows // dataset.geometry.chunk[0]
            > self.committed_rows[name] // dataset.geometry.chunk[0]
            for name, dataset in self.datasets.items()
            if dataset.grows
        )

    def _counts(self) -> dict[str, int]:
        """Return how many chunks each dataset may get with the next commit."""
        counts = {}
        for name, dataset in self.datasets.items():
            height = dataset.geometry.chunk[0]
            first = self.committed_rows[name] // height if dataset.grows else 0
            blocks = ceil_div(dataset.num_rows, height) - first
            is_new = dataset.num_rows != self.committed_rows[name] or self.is_stale
            counts[name] = blocks * dataset.geometry.num_cells if is_new else 0
        return counts

    def _commit(self, place: int, arena: int) -> None:
        assert self.target is not None
        file = self.target.file
        file.give(place, arena)
        self.target.check_pages(self._pages)
        rows = {name: each.rows for name, each in self.datasets.items() if each.grows}
        file.commit(self._added, rows, self.steps + self.num_waiting, self.space.end)

    def commit(self, kind: str, flush: bool = False) -> None:
        """Make all steps a part of the file, or return to the last commit and raise."""
        # New objects first, because the headers of the commit are copies of theirs.
        with self.undone_if_failed():
            if self.is_changed:
                self.space.end = self.ranks.on_root(self._named(self._apply), kind)
                self.is_changed = False
                self.changes = Changes()
            self.store_chunks(kind, True, flush or self.durable)
        self._note_commit()

    def _note_commit(self) -> None:
        self.steps += self.num_waiting
        self.num_waiting = 0
        self.is_stale = False
        self._added, self._pages = {}, {}
        for name, dataset in self.datasets.items():
            self.committed_rows[name] = dataset.num_rows
        self.store.note_commit()
        self.direct.note_commit()
        self.space.note_commit()

    def _apply(self) -> int:
        assert self.target is not None
        return self.target.file.apply(self.changes, self.space.end)

    @contextlib.contextmanager
    def undone_if_failed(self) -> Iterator[None]:
        """Return to the last commit if the body raises, which it does on all ranks."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Drop the steps that are not committed. Local, on all ranks."""
        self.num_waiting = 0
        self._added, self._pages = {}, {}
        for name, dataset in self.datasets.items():
            if dataset.grows:
                dataset.rows = self.committed_rows[name]
        if self.mode == "w":
            # Chunks of earlier steps are in the file, and not in memory any more. With only one
            # commit, there is nothing to return to.
            self.is_lost = True
            self.abandon()
            return
        self.is_stale = True
        self.store.undo(self.handle)
        self.direct.undo()
        self.space.note_failure()

    def cut(self, kind: str, steps: int, rows: dict[str, int]) -> None:
        """Return to an earlier step, in one commit."""
        before = self.steps, dict(self.committed_rows)
        try:
            with self.outcome(kind):
                # From the file, because chunks of earlier rows have left the memory.
                self._read_existing(rows)
            self.steps, self.is_stale = steps, True
            self.commit(kind, flush=True)
        except (OSError, DataError):
            # The file still has all steps.
            self.steps, self.is_stale = before[0], True
            with self.outcome(kind):
                self._read_existing(before[1])
            raise

    # The end

    def finish(self, kind: str) -> None:
        """Close the file, which is complete."""
        # On every rank, before the file gets its name: all chunks must be on disk by then.
        with self.outcome(kind):
            os.fsync(self.handle)
        self.ranks.on_root(self._named(self._publish), kind)
        self.target = None
        self.abandon()

    def _publish(self) -> None:
        assert self.target is not None
        self.target.file.finish(self.space.end)
        self.target.publish()

    def abandon(self) -> None:
        """Close everything as it is. Local."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        if hasattr(self, "store"):
            self.store.close()
        if self.target is not None:
            self.target.abandon()
            self.target = None


@functools.lru_cache(maxsize=64)
def parsed_report(text: bytes) -> Any:
    """Return the report that a rank has sent. Nobody changes it: most steps report the same."""
    return json.loads(text)


class Mover:
    """Rows on their way to the owners of their chunks, in several rounds."""

    def __init__(self, session: Session, kind: str, parts: Iterable[PlacedPart]) -> None:
        ranks = session.ranks
        self._session = session
        self._kind = kind
        self._pieces = pieces_of(parts, ranks.rank, ranks.size)
        self._datasets = list(session.datasets.values())
        self._arrived: list[tuple[OutputDataset, Piece, Any]] = []
        self._has_more = True

    def round(self, call: CollectiveCall) -> None:
        """Exchange some pieces; inside `call`, in which the ranks have agreed."""
        with call.moving():
            # Only collected, because `check` may raise on this rank, and inside the exchange the
            # other ranks would wait for it.
            put: Callable[..., None] = lambda *piece: self._arrived.append(piece)  # noqa: E731
            self._has_more = exchange_round(call, self._datasets, self._pieces, put)

    def take_all(self) -> None:
        """Keep all pieces that this rank owns. Local."""
        self._has_more = False
        self._arrived = [piece[:3] for piece in self._pieces]

    def finish(self) -> None:
        """Store the pieces that have arrived, and exchange all others."""
        session, ranks = self._session, self._session.ranks
        self._store()
        while self._has_more:
            session.store_chunks(self._kind, False)
            with ranks.call(self._kind) as call:
                call.agree("more rows")
                self.round(call)
            self._store()

    def _store(self) -> None:
        session, store = self._session, self._session.store
        is_checked = any(not dataset.grows for dataset in self._datasets)
        # Rows of growing datasets arrive exactly once. Others may have been written before.
        with session.outcome(self._kind) if is_checked else contextlib.nullcontext():
            for dataset, piece, elements in self._arrived:
                if not dataset.grows:
                    store.check(dataset, piece, elements.shape)
                store.put(dataset, piece, elements)
            store.spill()
        self._arrived = []
