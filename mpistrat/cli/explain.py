"""``mpistrat explain``: which rank left the common sequence of collectives first, and where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mpistrat.cli.command import Command
from mpistrat.cli.divergence import Act, Divergence, first_divergences, last_acts
from mpistrat.cli.output import print_error, print_json, print_line, print_table
from mpistrat.epochs.flight_dump import FORMAT, FORMAT_VERSION
from mpistrat.epochs.report import rank_list, rank_spans

__all__ = ["COMMAND"]

_MAX_RANKS = 2**24


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", help="flight records, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def _run(arguments: argparse.Namespace) -> int:
    try:
        dumps = _read_all([Path(each) for each in arguments.path])
    except ValueError as error:
        print_error("explain", error)
        return 2
    size = next(iter(dumps.values()))["size"]
    missing = [rank for rank in range(size) if rank not in dumps]
    try:
        found, last = first_divergences(dumps), last_acts(dumps)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        print_error("explain", f"A flight record is damaged: {type(error).__name__}: {error}.")
        return 2
    if arguments.json:
        print_json(_as_json(size, missing, found, last))
    else:
        print_line(f"{len(dumps)} of {size} ranks have a flight record.")
        _print(size, missing, found, last)
    return 1 if found else 0


def _read_all(paths: list[Path]) -> dict[int, dict[str, Any]]:
    """Return the records by rank.

    Raises
    ------
    ValueError
        If there are none, one cannot be read, or they are not of one job.
    """
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
                f"{origins[rank]} and {file} are both of rank {rank}. Give one record for each."
            )
        dumps[rank], origins[rank] = dump, file
    sizes = {rank: dump.get("size") for rank, dump in dumps.items()}
    if len(set(sizes.values())) > 1:
        first = min(sizes)
        other = next(rank for rank in sizes if sizes[rank] != sizes[first])
        raise ValueError(
            f"{origins[first]} is of a job of {sizes[first]} ranks, {origins[other]} of one of "
            f"{sizes[other]}. Remove the records of the older job."
        )
    return dumps


def _read(file: Path) -> dict[str, Any]:
    try:
        dump = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is no flight record: it is not JSON.") from None
    if not isinstance(dump, dict) or dump.get("format") != FORMAT:
        raise ValueError(f"{file} is no flight record.")
    if dump.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has version {dump.get('format_version')} of the format; this command reads "
            f"version {FORMAT_VERSION}."
        )
    _check(dump, file)
    return dump


def _check(dump: dict[str, Any], file: Path) -> None:
    """Raise ValueError for numbers that cannot be, before anything is counted by them."""
    rank, size = dump.get("rank"), dump.get("size")
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= _MAX_RANKS:
        raise ValueError(f"{file} is damaged: it is of rank {rank!r} of {size!r}.")
    try:
        spans = [span for channel in dump["channels"] for span in channel["members"]]
        are_ranks = all(0 <= first <= last < size for first, last in spans)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from None
    if not are_ranks:
        raise ValueError(f"{file} is damaged: it has channels of ranks that are not in {size}.")


def _print(size: int, missing: list[int], found: list[Divergence], last: list[Act]) -> None:
    if missing:
        print_line(f"There is none of {rank_list(missing)}.")
    for each in found:
        _print_divergence(each, size)
    if not found:
        print_line("The ranks agree on every collective in their records.")
    print_line("\nWhat each rank did last:")
    print_table(
        ("ranks", "collective", "line", "state", "dumped because"),
        [
            (_short(ranks), act["collective"], act["site"], act["state"], act["dumped"])
            for ranks, act in last
        ],
    )


def _print_divergence(each: Divergence, size: int) -> None:
    among = "" if len(each.members) == size else f" among {rank_list(each.members)}"
    print_line(f"\nThe ranks part at collective {each.number}{among}: {_verdict(each)}")
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


def _verdict(each: Divergence) -> str:
    if len(each.groups) == 1:
        return "all came to the same call, and yet they did not agree."
    suspects = each.suspects
    if len(suspects) == len(each.members):
        return f"{rank_list(suspects)} differ from each other."
    verb = "differs" if len(suspects) == 1 else "differ"
    return f"{rank_list(suspects)} {verb} from the others."


def _short(ranks: tuple[int, ...]) -> str:
    return rank_list(ranks).partition(" ")[2]


def _as_json(
    size: int, missing: list[int], found: list[Divergence], last: list[Act]
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
    "Say from flight records where ranks have parted.",
    _add_arguments,
    _run,
)
