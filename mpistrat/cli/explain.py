"""Command ``mpistrat explain``: the first collective at which ranks diverge."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.cli.output import (
    Command,
    print_error,
    print_heading,
    print_json,
    print_line,
    print_table,
)
from mpistrat.failures.flight_dumps import FORMAT, FORMAT_VERSION
from mpistrat.system.text import (
    counted,
    format_call,
    is_structure,
    rank_list,
    rank_spans,
    ranks_by_value,
)
from mpistrat.tracing.flight_recorder import State

_COUNTERS = ("runs", "merge_calls", "updates", "failures")
_CAME = (State.AGREED, State.DONE)

_Act = tuple[tuple[int, ...], dict[str, str]]
"""Ranks, and the columns of their last action."""


@dataclass(frozen=True)
class _Group:
    """Ranks that did the same at one collective."""

    ranks: tuple[int, ...]
    """World ranks."""
    what: str
    """The collective, or why it is unknown."""
    site: str
    """``file.py:LINE`` in the user's code."""
    state: str
    counters: Mapping[str, int]
    """Number of calls before the collective, by kind."""


@dataclass(frozen=True)
class _Divergence:
    """First collective of a communicator at which its ranks differ."""

    members: tuple[int, ...]
    """All ranks of the communicator."""
    number: int
    groups: tuple[_Group, ...]
    """Groups of ranks, the largest first."""
    began_ns: int
    """Time when the first rank reached it, by the wall clock of its node."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks outside of the largest group; all ranks if several groups are the largest."""
        sizes = [len(group.ranks) for group in self.groups]
        groups = self.groups if sizes.count(sizes[0]) > 1 else self.groups[1:]
        return tuple(sorted(rank for group in groups for rank in group.ranks))


def _first_divergences(dumps: Mapping[int, dict[str, Any]]) -> list[_Divergence]:
    """Return the divergence of each communicator whose ranks diverge, the earliest first."""
    found = []
    for (members, _), of_ranks in _channels(dumps).items():
        divergence = _first(dumps, members, of_ranks)
        if divergence is not None:
            found.append(divergence)
    return sorted(found, key=lambda each: each.began_ns)


def _last_acts(dumps: Mapping[int, dict[str, Any]]) -> list[_Act]:
    """Return the last action of each rank and why it dumped, grouped by equal actions."""
    acts: list[tuple[int, tuple[tuple[str, str], ...]]] = []
    for rank, dump in sorted(dumps.items()):
        entries = [each for channel in dump["channels"] for each in channel["entries"]]
        last = max(entries, key=lambda each: int(each["began_ns"]), default=None)
        act = {"dumped": dump["reason"], "collective": "none", "site": "", "state": ""}
        if last is not None:
            act |= {
                "collective": f"{last['number']}: {_what(last)}",
                "site": last["site"],
                "state": last["state"],
            }
        acts.append((rank, tuple(act.items())))
    return [(tuple(ranks), dict(act)) for act, ranks in ranks_by_value(acts).items()]


def _channels(
    dumps: Mapping[int, dict[str, Any]],
) -> dict[tuple[tuple[int, ...], int], dict[int, dict[str, Any]]]:
    """Return each rank's channels, by members and a count of channels with the same members."""
    found: dict[tuple[tuple[int, ...], int], dict[int, dict[str, Any]]] = {}
    for rank, dump in sorted(dumps.items()):
        seen: dict[tuple[int, ...], int] = {}
        for channel in dump["channels"]:
            members = tuple(r for a, b in channel["members"] for r in range(a, b + 1))
            # Ranks create communicators with the same members in the same order, so the count tells
            # them apart.
            seen[members] = seen.get(members, -1) + 1
            found.setdefault((members, seen[members]), {})[rank] = channel
    return found


def _first(
    dumps: Mapping[int, dict[str, Any]],
    members: tuple[int, ...],
    of_ranks: Mapping[int, dict[str, Any]],
) -> _Divergence | None:
    entries = {
        rank: {each["number"]: each for each in channel["entries"]}
        for rank, channel in of_ranks.items()
    }
    # Records are ring buffers. From this number on, every rank still has its entries.
    first = max((min(each) for each in entries.values() if each), default=0)
    for number in sorted(set().union(*entries.values())):
        here = {rank: each[number] for rank, each in entries.items() if number in each}
        if number < first or all(each["state"] in _CAME for each in here.values()):
            continue
        absent = [rank for rank in members if rank not in here]
        groups = [*_groups(here), *_absent(absent, dumps, of_ranks)]
        if len(groups) > 1 or _failed_to_agree(here.values()):
            groups.sort(key=lambda group: -len(group.ranks))
            began_ns = min(_wall_ns(dumps[rank], each) for rank, each in here.items())
            return _Divergence(members, number, tuple(groups), began_ns)
    return None


def _groups(here: Mapping[int, dict[str, Any]]) -> Iterator[_Group]:
    """Yield the groups of ranks that reached the same collective."""
    keys: list[tuple[int, tuple[Any, ...]]] = []
    for rank, entry in here.items():
        # First the values on which the ranks must agree, then the rest of the table.
        refused = entry["state"] == State.REFUSED and "ends" not in entry["details"]
        details = () if refused else tuple(entry["details"])
        key = (entry["kind"], entry["name"], entry["strategy"], details, refused)
        keys.append((rank, (*key, *(entry[name] for name in _COUNTERS))))
    structures = {tuple(filter(is_structure, each["details"])) for each in here.values()}
    for ranks in ranks_by_value(keys).values():
        entries = [here[rank] for rank in ranks]
        yield _Group(
            tuple(ranks),
            _what(entries[0], with_structure=len(structures) > 1),
            ", ".join(dict.fromkeys(each["site"] for each in entries)),
            ", ".join(dict.fromkeys(each["state"] for each in entries)),
            {name: entries[0][name] for name in _COUNTERS},
        )


def _absent(
    absent: Sequence[int],
    dumps: Mapping[int, dict[str, Any]],
    of_ranks: Mapping[int, dict[str, Any]],
) -> Iterator[_Group]:
    """Yield groups of ranks that did not reach the collective."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    for rank in absent:
        channel = of_ranks.get(rank)
        counters: dict[str, int] = {}
        if rank not in dumps:
            what, site, state = "not known: there is no dump of it", "", "no dump"
        elif channel is None:
            what, site, state = "never opened this communicator", _user_place(dumps[rank]), "absent"
        else:
            replica = channel.get("replica")
            why = _reason(dumps[rank]["reason"]) + (f", {replica}" if replica else "")
            what = f"did not come ({why})"
            site, state = _user_place(dumps[rank]), "absent"
            counters = {name: channel[name] for name in _COUNTERS}
        found.append((rank, (what, site, state, tuple(counters.items()))))
    for (what, site, state, items), ranks in ranks_by_value(found).items():
        yield _Group(tuple(ranks), what, site, state, dict(items))


def _user_place(dump: dict[str, Any]) -> str:
    """Return the innermost line of the program at the time of the dump, shortened."""
    if not dump["stack"]:
        return ""
    place: str = dump["stack"][-1].partition(" in ")[0]
    return place.rpartition("/")[2]


def _failed_to_agree(entries: Iterable[dict[str, Any]]) -> bool:
    """Return whether all ranks failed before they agreed, although their entries are equal."""
    return all(each["state"] == State.FAILED and not each["agreed_ns"] for each in entries)


def _wall_ns(dump: dict[str, Any], entry: dict[str, Any]) -> int:
    # Monotonic clocks have a different zero on each node. The dump has both clocks at one moment.
    return int(dump["wall_clock_ns"] - dump["monotonic_ns"] + entry["began_ns"])


def _what(entry: dict[str, Any], with_structure: bool = False) -> str:
    return format_call(entry["kind"], entry["name"], entry["details"], with_structure)


_MAX_RANKS = 2**24


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="+", metavar="PATH", help="flight records, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(arguments: argparse.Namespace) -> int:
    try:
        dumps = _read_all([Path(each) for each in arguments.path])
    except ValueError as error:
        print_error("explain", error)
        return 2
    size = next(iter(dumps.values()))["size"]
    missing = [rank for rank in range(size) if rank not in dumps]
    try:
        found, last = _first_divergences(dumps), _last_acts(dumps)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        print_error("explain", f"A flight record is damaged: {type(error).__name__}: {error}.")
        return 2
    if arguments.json:
        print_json(_as_json(size, missing, found, last))
    else:
        print_line(f"{len(dumps)} of {counted(size, 'rank')} left a flight record.")
        _print(size, missing, found, last)
    return 1 if found else 0


def _read_all(paths: list[Path]) -> dict[int, dict[str, Any]]:
    """Return the records by rank, or raise ValueError if they are not from a single job."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("[!.]*.json")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"There is no flight record (*.json) in the folder {path}.")
        files += found
    dumps: dict[int, dict[str, Any]] = {}
    origins: dict[int, Path] = {}
    for file in files:
        dump = _read(file)
        rank = dump["rank"]
        if rank in dumps:
            raise ValueError(
                f"{origins[rank]} and {file} are both from rank {rank}. Pass one record per rank."
            )
        dumps[rank], origins[rank] = dump, file
    sizes: dict[int, int] = {rank: dump["size"] for rank, dump in dumps.items()}
    if len(set(sizes.values())) > 1:
        first = min(sizes)
        other = next(rank for rank in sizes if sizes[rank] != sizes[first])
        raise ValueError(
            f"{origins[first]} is from a job of {counted(sizes[first], 'rank')}, {origins[other]} "
            f"from a job of {sizes[other]}. Remove the records of the older job."
        )
    return dumps


def _read(file: Path) -> dict[str, Any]:
    try:
        dump = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not a flight record: it is not JSON.") from None
    if not isinstance(dump, dict) or dump.get("format") != FORMAT:
        raise ValueError(f"{file} is not a flight record.")
    if dump.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has version {dump.get('format_version')} of the format, but this command "
            f"reads version {FORMAT_VERSION}."
        )
    _check(dump, file)
    return dump


def _check(dump: dict[str, Any], file: Path) -> None:
    """Raise ValueError for impossible ranks and sizes, before anything loops over them."""
    rank, size = dump.get("rank"), dump.get("size")
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= _MAX_RANKS:
        raise ValueError(f"{file} is damaged: it names rank {rank!r} of {size!r}.")
    try:
        spans = [span for channel in dump["channels"] for span in channel["members"]]
        are_ranks = all(0 <= first <= last < size for first, last in spans)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from None
    if not are_ranks:
        raise ValueError(
            f"{file} is damaged: its channels have ranks beyond the {size} of the job."
        )


def _print(size: int, missing: list[int], found: list[_Divergence], last: list[_Act]) -> None:
    if missing:
        print_line(f"There is no record from {rank_list(missing)}.")
    for each in found:
        _print_divergence(each, size)
    if not found:
        print_line("The ranks agree on every collective in their records.")
    shown = list(_elsewhere(last, found))
    if not shown:
        return
    print_heading("What each rank did last:" if not found else "What the other ranks did last:")
    print_table(
        ("ranks", "last collective", "line", "state", "record written because"),
        [
            (_short(ranks), act["collective"], act["site"], act["state"], _reason(act["dumped"]))
            for ranks, act in shown
        ],
    )


def _elsewhere(last: list[_Act], found: list[_Divergence]) -> Iterator[_Act]:
    """Yield the last actions that no table of a divergence shows."""
    shown = {
        (rank, str(each.number), site)
        for each in found
        for group in each.groups
        for site in group.site.split(", ")
        for rank in group.ranks
    }
    for ranks, act in last:
        number = act["collective"].partition(":")[0]
        others = tuple(rank for rank in ranks if (rank, number, act["site"]) not in shown)
        if others:
            yield others, act


def _reason(dumped: str) -> str:
    """Return why a record was written, without the colon of a message that has more lines."""
    return dumped.removesuffix(":")


def _print_divergence(each: _Divergence, size: int) -> None:
    among = "" if len(each.members) == size else f" among {rank_list(each.members)}"
    print_heading(f"{_verdict(each)} at collective {each.number}{among}:")
    counters = [
        name
        for name in ("runs", "merge_calls", "updates", "failures")
        if len({group.counters[name] for group in each.groups if group.counters}) > 1
    ]
    print_table(
        ("ranks", "collective", "line", "state", *counters),
        [
            (
                _short(group.ranks),
                group.what,
                group.site,
                group.state,
                *(group.counters.get(name, "") for name in counters),
            )
            for group in each.groups
        ],
    )


def _verdict(each: _Divergence) -> str:
    if len(each.groups) == 1:
        return "The ranks made the same call but did not agree"
    suspects = each.suspects
    one, *others = suspects
    ranks = f"Ranks {one} and {others[0]}" if len(others) == 1 else rank_list(suspects).capitalize()
    if len(suspects) == len(each.members):
        return f"{ranks} diverge"
    return f"{ranks} {'diverge' if others else 'diverges'} from the others"


def _short(ranks: tuple[int, ...]) -> str:
    return rank_list(ranks).partition(" ")[2]


def _as_json(
    size: int, missing: list[int], found: list[_Divergence], last: list[_Act]
) -> dict[str, Any]:
    return {
        "size": size,
        "missing_dumps": missing,
        "divergences": [
            {
                "members": rank_spans(each.members),
                "number": each.number,
                "suspects": each.suspects,
                "groups": [vars(group) for group in each.groups],
            }
            for each in found
        ],
        "last": [{"ranks": ranks, **act} for ranks, act in last],
    }


COMMAND = Command(
    "explain",
    "Find the first collective at which ranks diverge, from flight records.",
    _add_arguments,
    _run,
    "find problems",
    """\
Find out why a job hung or failed if its ranks did not make the same calls. When a job that runs
with MPISTRAT_FLIGHT_DIR=DIR fails, each rank writes a flight record to DIR. explain names the
first collective at which the ranks diverge, with ranks and lines. The exit code is 1 if they
diverge.

  MPISTRAT_FLIGHT_DIR=flight mpiexec -n 4 python train.py
  mpistrat explain flight
""",
)
