"""Steps and rows of a writer: what is checked and agreed before rows move."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpistrat.agreement.ledger import Signature
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset, canonical, make_dataset
from mpistrat.data.hdf5_writer.exchange import PlacedPart, not_kept
from mpistrat.data.hdf5_writer.parts import (
    Leaf,
    check_rows,
    check_split,
    check_type,
    parse_step,
    place_leaf,
)
from mpistrat.data.hdf5_writer.session import Session, parsed_report
from mpistrat.data.hdf5_writer.step_layout import Ranks, appended, written
from mpistrat.errors import DataError
from mpistrat.layout import Layout

_NOT_AHEAD, _FAILED_AHEAD = b"-", b"!"
"""What a rank reports that has not written rows ahead of the agreement, or could not."""


@dataclass
class _Checked:
    """A step whose values were checked, with what the ranks compare and exchange."""

    kinds: tuple[Any, ...]
    """Names, dtypes and shapes."""
    splits: tuple[int, ...]
    datasets: dict[str, OutputDataset]
    details: tuple[str, ...]
    """What must be equal on all ranks, as text."""
    reports: list[dict[str, Any]]
    """The lengths of the parts of this rank."""
    signature: Signature | None = None
    text: bytes = b""
    """The reports as JSON."""
    of_ranks: tuple[bytes, ...] = ()
    """The reports of all ranks about the last such step."""
    is_usual: bool = False
    """Whether they were the same as those of the step before."""


def _kinds(leaves: Mapping[str, Leaf]) -> tuple[Any, ...]:
    return tuple(
        (name, leaf.is_shared, leaf.dtype, [each.shape for each in leaf.arrays])
        for name, leaf in leaves.items()
    )


def _splits(datasets: Mapping[str, OutputDataset]) -> tuple[int, ...]:
    return tuple(each.split_axis for each in datasets.values())


class Steps:
    """Methods of `HDF5Writer` that write rows. `require` checks the context of a call."""

    def __init__(
        self,
        session: Session,
        require: Callable[[str], None],
        defaults: Mapping[str, Any],
        layout: Layout,
        steps_per_commit: int,
    ) -> None:
        self._session = session
        self._require = require
        self._defaults = defaults
        self._layout = layout
        self._members = Ranks(layout)
        self._per_commit = steps_per_commit
        self._mode_allows_ahead = session.mode == "a" and steps_per_commit == 1
        self._names: tuple[str, ...] | None = None
        """Names of the datasets of each step, once they are known."""
        self._last: _Checked | None = None
        """The last step, whose checks count for the next one if that has the same kinds."""

    def append(self, step: Mapping[str, Any]) -> None:
        """Write rows: see `HDF5Writer.append`. **Collective**."""
        kind = "HDF5Writer.append"
        session = self._session
        created: list[str] = []
        with self._session.ranks.call(kind) as call:
            self._require(kind)
            leaves = self._parse(kind, step)
            checked, new = self._checked(leaves), list[OutputDataset]()
            if checked is None:
                checked, new = self._check(kind, leaves)
            datasets = checked.datasets
            # All checks are before this line. If one fails on some ranks, no rank has moved data.
            call.include_values([each.arrays[0] for each in leaves.values() if each.is_shared])
            end = session.space.end
            ahead = self._write_ahead(kind, leaves, checked)
            try:
                heads, texts = self._agree_with(call, leaves, checked, ahead)
            except BaseException:
                if ahead != _NOT_AHEAD:
                    session.drop_ahead(end)
                raise
            is_usual = texts == checked.of_ranks
            is_written = is_usual and all(each.isdigit() for each in heads)
            checked.is_usual, checked.of_ranks = is_usual, texts
            # All ranks know what each has done, so all drop it, or all keep it.
            if not is_written and any(each != _NOT_AHEAD for each in heads):
                session.drop_ahead(end)
            if not is_written:
                parts, counts = self._placed(kind, leaves, checked)
                # Not earlier: the lines above may raise on all ranks, and the writer must then be
                # as before.
                for dataset in new:
                    session.note_groups(dataset.name)
                    session.add(dataset)
                    created.append(dataset.name)
                sent = self._take_rows(datasets, parts, counts)
                # All ranks hold a row that is shared, as the agreement has shown.
                is_sent = any(
                    not (leaf.is_shared or session.direct.takes_steps(datasets[name]))
                    for name, leaf in leaves.items()
                )
                mover = session.move(kind, call, sent, is_sent)
        try:
            with session.undone_if_failed():
                session.num_waiting += 1
                if is_written:
                    session.commit_written(kind, int(heads[0]))
                else:
                    mover.finish()
                    self._commit_or_store(kind)
        except Exception:
            if session.is_changed and not session.is_lost:  # else the new datasets are in the file
                for name in created:
                    session.forget(name)
            raise
        self._names = tuple(leaves)
        if not new:
            self._last = checked

    def _placed(
        self, kind: str, leaves: Mapping[str, Leaf], checked: _Checked
    ) -> tuple[dict[str, list[PlacedPart]], dict[str, int]]:
        """Return the parts of this rank and the numbers of new rows, from all ranks' reports."""
        reports = [parsed_report(text) for text in checked.of_ranks]
        parts, counts = {}, {}
        for number, (name, leaf) in enumerate(leaves.items()):
            of_leaf = [report[number] for report in reports]
            parts[name], counts[name] = appended(
                kind, leaf, checked.datasets[name], of_leaf, self._members
            )
        return parts, counts

    def _take_rows(
        self,
        datasets: Mapping[str, OutputDataset],
        parts: Mapping[str, list[PlacedPart]],
        counts: Mapping[str, int],
    ) -> list[PlacedPart]:
        """Accept new rows, and return the parts that the owners of chunks need."""
        direct, sent = self._session.direct, []
        for name, count in counts.items():
            dataset = datasets[name]
            if direct.takes_steps(dataset):
                entries = direct.add_rows(dataset, dataset.rows, count, parts[name])
                self._session.add_chunks(entries)
            else:
                sent += parts[name]
            dataset.rows += count
        return sent

    def _write_ahead(self, kind: str, leaves: Mapping[str, Leaf], checked: _Checked) -> bytes:
        """Write rows before the ranks agree, if each will probably bring as many as last time.

        Then the agreement also shows that all have written, and `append` needs one round less. No
        reader sees these rows before the commit. Returns how many bytes rank 0 needs for it.
        """
        session = self._session
        is_known = checked is self._last and checked.is_usual
        if not (is_known and self._mode_allows_ahead and session.can_write_ahead(checked.datasets)):
            return _NOT_AHEAD
        try:
            self._take_rows(checked.datasets, *self._placed(kind, leaves, checked))
            return b"%d" % session.write_ahead()
        except Exception:
            return _FAILED_AHEAD  # it fails again, where all ranks learn why

    def _commit_or_store(self, kind: str) -> None:
        session = self._session
        if session.mode == "a" and session.num_waiting >= self._per_commit:
            session.commit(kind)
        elif session.direct.has_waiting or session.has_full_blocks():
            # Complete chunks leave the memory before the commit, so that many steps per commit do
            # not need more memory than one. Rows that are written directly are still in arrays of
            # the program.
            session.store_chunks(kind, False)

    def _checked(self, leaves: Mapping[str, Leaf]) -> _Checked | None:
        """Return what is known of a step with the same names, dtypes and shapes as the last."""
        last, datasets = self._last, self._session.datasets
        # The parts of one replica's ranks are compared by digests, which every step has its own.
        if last is None or self._layout.ranks_per_replica > 1 or last.kinds != _kinds(leaves):
            return None
        same = all(datasets.get(n) is each for n, each in last.datasets.items())
        return last if same and last.splits == _splits(last.datasets) else None

    def _check(self, kind: str, leaves: Mapping[str, Leaf]) -> tuple[_Checked, list[OutputDataset]]:
        """Check the values of a step, and return its datasets, and those that are new."""
        self._check_names(kind, leaves)
        datasets, new = self._datasets_of(kind, leaves)
        for name, leaf in leaves.items():
            check_type(kind, leaf, datasets[name])
            is_split = datasets[name].split_axis and not leaf.is_shared
            (check_split if is_split else check_rows)(kind, leaf, datasets[name])
        details = tuple(self._signature(leaf, datasets[name]) for name, leaf in leaves.items())
        reports = [self._lengths(leaf, datasets[name]) for name, leaf in leaves.items()]
        return _Checked(_kinds(leaves), _splits(datasets), datasets, details, reports), new

    def write(self, values: Mapping[str, Any], at: Any) -> None:
        """Write rows: see `HDF5Writer.write`. **Collective**."""
        kind = "HDF5Writer.write"
        session = self._session
        with self._session.ranks.call(kind) as call:
            self._require(kind)
            if self._session.mode != "w":
                raise ValueError(f'{kind} needs the mode "w". In mode "a", use append.')
            leaves = self._parse(kind, values)
            by_name = at if isinstance(at, Mapping) else dict.fromkeys(leaves, at)
            by_name = {canonical(kind, name): each for name, each in by_name.items()}
            if set(by_name) != set(leaves):
                raise DataError(f"{kind}: values and at have different names.")
            for name, leaf in leaves.items():
                dataset = session.datasets.get(name)
                if dataset is None or dataset.grows:
                    raise DataError(
                        f"{kind}: there is no dataset {name!r} of fixed size. Create it with "
                        "create_dataset; datasets that grow are written by append."
                    )
                check_type(kind, leaf, dataset)
                place_leaf(kind, leaf, by_name[name], dataset)
            call.include_values([each.arrays[0] for each in leaves.values() if each.is_shared])
            own_reports = [
                self._members.reports(leaf, [self._described_place(leaf, each) for each in leaf.at])
                | {"rows": [int(each.shape[0]) for each in leaf.arrays]}
                for leaf in leaves.values()
            ]
            sorts = tuple(f"{name}: {self._sort_of_place(leaf)}" for name, leaf in leaves.items())
            _, texts = self._agree_with(call, leaves, _Checked((), (), {}, sorts, own_reports))
            reports = [parsed_report(each) for each in texts]
            sent, known, has_sent = [], [], False
            for number, (name, leaf) in enumerate(leaves.items()):
                dataset, of_leaf = session.datasets[name], [report[number] for report in reports]
                parts, boxes = written(kind, leaf, dataset, of_leaf, self._members)
                entries = session.direct.takes_boxes(dataset, boxes)
                is_known = session.direct.knows_rows(dataset)
                if entries is None:
                    has_sent = True
                    sent += parts if is_known else [not_kept(part) for part in parts]
                    parts = []
                else:
                    session.add_chunks(entries)
                if is_known:
                    known.append((dataset, session.direct.covered(dataset, boxes or ()), parts))
            # Not earlier: rows that are written twice have raised for all datasets.
            for each in known:
                session.direct.add_boxes(*each)
            mover = session.move(kind, call, sent, has_sent)
        mover.finish()
        session.store_chunks(kind, False)

    def _check_names(self, kind: str, leaves: Mapping[str, Leaf]) -> None:
        session = self._session
        if self._names is not None:
            expected = set(self._names)
        elif session.steps:
            # A resumed file does not say which datasets form a step. Those with rows belong to it,
            # and a dataset without rows may belong to it if the step has its name.
            expected = {n for n, each in session.datasets.items() if each.grows and each.rows}
            expected |= {n for n in leaves if n in session.datasets}
        else:
            return
        if set(leaves) != expected:
            missing, more = sorted(expected - set(leaves)), sorted(set(leaves) - expected)
            raise DataError(
                f"{kind}: every step must have the same names. "
                + (f"Missing: {', '.join(missing)}. " if missing else "")
                + (f"New: {', '.join(more)}." if more else "")
            )

    def _datasets_of(
        self, kind: str, leaves: Mapping[str, Leaf]
    ) -> tuple[dict[str, OutputDataset], list[OutputDataset]]:
        """Return the dataset of each leaf, and those that do not exist yet."""
        session = self._session
        found, new = {}, []
        for name, leaf in leaves.items():
            dataset = session.datasets.get(name)
            if dataset is None:
                if name in session.known_objects:
                    raise DataError(f"{kind}: {name!r} is not a dataset that can grow.")
                options = dict(self._defaults)
                shape = (None, *leaf.row_shape)
                fast = session.fast_gzip
                dataset = make_dataset(name, shape, leaf.dtype, fast_gzip=fast, **options)
                new.append(dataset)
            elif not dataset.grows:
                raise DataError(f"{kind}: {name!r} has a fixed size. Use write.")
            found[name] = dataset
        return found, new

    def _signature(self, leaf: Leaf, dataset: OutputDataset) -> str:
        shape: list[Any] = list(leaf.arrays[0].shape)
        if not leaf.is_shared:
            shape[max(dataset.split_axis - 1, 0)] = "n"
        sort = "the same row" if leaf.is_shared else "rows"
        return f"{leaf.name}: {sort} {leaf.dtype} ({', '.join(map(str, shape))})"

    def _lengths(self, leaf: Leaf, dataset: OutputDataset) -> dict[str, Any]:
        axis = max(dataset.split_axis - 1, 0)
        return self._members.reports(leaf, [int(each.shape[axis]) for each in leaf.arrays])

    def _agree_with(
        self,
        call: CollectiveCall,
        leaves: Mapping[str, Leaf],
        checked: _Checked,
        ahead: bytes = _NOT_AHEAD,
    ) -> tuple[list[bytes], tuple[bytes, ...]]:
        """Agree on a call, and return what all ranks have done ahead, and their reports."""
        if checked.signature is None:
            checked.signature = Signature(call.signature(*checked.details))
            checked.text = json.dumps(checked.reports, separators=(",", ":")).encode()
        ranks, is_same = self._session.ranks, all(leaf.is_shared for leaf in leaves.values())
        # What all ranks hold needs no report: its values are in the agreement.
        if ranks.size == 1 or (is_same and not self._session.direct.is_possible):
            call.agree_on(checked.signature)
            call.is_moving = False
            return [ahead] * ranks.size, (checked.text,) * ranks.size
        both = call.agree_with(checked.signature, b";".join((ahead, checked.text)))
        heads, _, texts = zip(*(each.partition(b";") for each in both), strict=True)
        return list(heads), texts

    def _described_place(self, leaf: Leaf, at: Any) -> Any:
        if at is None or isinstance(at, tuple):
            return at
        if isinstance(at, range):
            return ["range", at.start, at.stop]
        # Only of some datasets, all ranks must know all rows.
        knows = self._session.direct.knows_rows(self._session.datasets[leaf.name])
        return ["rows", [int(row) for row in (at if knows else at[:1])], len(at)]

    def _sort_of_place(self, leaf: Leaf) -> str:
        first = leaf.at[0]
        if leaf.is_shared:
            return f"the same row at {self._described_place(leaf, first)}"
        return "all rows" if first is None else "a box" if isinstance(first, tuple) else "rows"

    def _parse(self, kind: str, values: Any) -> dict[str, Leaf]:
        layout = self._layout
        num_local = len(layout.local_replicas) if layout.is_shared else 1
        is_shared_out = layout.is_shared and layout.num_replicas != layout.num_ranks
        return parse_step(kind, values, num_local, is_shared_out)
