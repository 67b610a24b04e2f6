"""Where the flight records of several ranks part, found without MPI.

The collectives of a communicator are numbered alike on all its ranks. So the records are laid
side by side, number by number, and the first number at which they differ is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.epochs.flight import State
from mpistrat.spelling import ranks_by_value

__all__ = ["Act", "Divergence", "first_divergences", "last_acts"]

_COUNTERS = ("runs", "merge_calls", "updates", "failures")
_CAME = (State.AGREED, State.DONE)

Act = tuple[tuple[int, ...], dict[str, str]]
"""Ranks, and what they did last."""


@dataclass(frozen=True)
class _Group:
    """Ranks that did the same at one number."""

    ranks: tuple[int, ...]
    """In the world."""
    what: str
    """The collective, or what is known in place of it."""
    site: str
    """``file.py:LINE`` of the user's code."""
    state: str
    counters: Mapping[str, int]
    """Calls begun before it."""


@dataclass(frozen=True)
class Divergence:
    """The first collective of a communicator at which its ranks differ."""

    members: tuple[int, ...]
    """All ranks of the communicator."""
    number: int
    groups: tuple[_Group, ...]
    """The largest first."""
    began_ns: int
    """When the first rank came to it, by the wall clock of its node."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside of the largest group; all of them where no group is larger."""
        sizes = [len(group.ranks) for group in self.groups]
        groups = self.groups if sizes.count(sizes[0]) > 1 else self.groups[1:]
        return tuple(sorted(rank for group in groups for rank in group.ranks))


def first_divergences(dumps: Mapping[int, dict[str, Any]]) -> list[Divergence]:
    """Return where each communicator's ranks part, the earliest first. Local.

    Parameters
    ----------
    dumps : mapping
        The documents of the ranks (`flight_dump.document`), by rank in the world.
    """
    found = []
    for (members, _), of_ranks in _channels(dumps).items():
        divergence = _first(dumps, members, of_ranks)
        if divergence is not None:
            found.append(divergence)
    return sorted(found, key=lambda each: each.began_ns)


def last_acts(dumps: Mapping[int, dict[str, Any]]) -> list[Act]:
    """Return what each rank did last and why it dumped, equal ranks together. Local."""
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
    """Return the channels by their members and a number among those with the same members."""
    found: dict[tuple[tuple[int, ...], int], dict[int, dict[str, Any]]] = {}
    for rank, dump in sorted(dumps.items()):
        seen: dict[tuple[int, ...], int] = {}
        for channel in dump["channels"]:
            members = tuple(r for a, b in channel["members"] for r in range(a, b + 1))
            seen[members] = seen.get(members, -1) + 1
            found.setdefault((members, seen[members]), {})[rank] = channel
    return found


def _first(
    dumps: Mapping[int, dict[str, Any]],
    members: tuple[int, ...],
    of_ranks: Mapping[int, dict[str, Any]],
) -> Divergence | None:
    entries = {
        rank: {each["number"]: each for each in channel["entries"]}
        for rank, channel in of_ranks.items()
    }
    # Older collectives have left the record of some rank.
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
            return Divergence(members, number, tuple(groups), began_ns)
    return None


def _groups(here: Mapping[int, dict[str, Any]]) -> Iterator[_Group]:
    """Yield the groups of ranks that came to the same collective."""
    keys: list[tuple[int, tuple[Any, ...]]] = []
    for rank, entry in here.items():
        # What ranks must agree on comes first; then all that the table shows.
        refused = entry["state"] == State.REFUSED and "ends" not in entry["details"]
        details = () if refused else tuple(entry["details"])
        key = (entry["kind"], entry["name"], entry["strategy"], details, refused)
        keys.append((rank, (*key, *(entry[name] for name in _COUNTERS))))
    for ranks in ranks_by_value(keys).values():
        entries = [here[rank] for rank in ranks]
        yield _Group(
            tuple(ranks),
            _what(entries[0]),
            ", ".join(dict.fromkeys(each["site"] for each in entries)),
            ", ".join(dict.fromkeys(each["state"] for each in entries)),
            {name: entries[0][name] for name in _COUNTERS},
        )


def _absent(
    absent: Sequence[int],
    dumps: Mapping[int, dict[str, Any]],
    of_ranks: Mapping[int, dict[str, Any]],
) -> Iterator[_Group]:
    """Yield the groups of ranks that did not come."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    for rank in absent:
        channel = of_ranks.get(rank)
        counters: dict[str, int] = {}
        if rank not in dumps:
            what, site, state = "not known: there is no dump of it", "", "no dump"
        elif channel is None:
            what, site, state = "never opened this communicator", _user_place(dumps[rank]), "absent"
        else:
            what = f"did not come ({dumps[rank]['reason']})"
            site, state = _user_place(dumps[rank]), "absent"
            counters = {name: channel[name] for name in _COUNTERS}
        found.append((rank, (what, site, state, tuple(counters.items()))))
    for (what, site, state, items), ranks in ranks_by_value(found).items():
        yield _Group(tuple(ranks), what, site, state, dict(items))


def _user_place(dump: dict[str, Any]) -> str:
    """Return where the main thread was when the rank dumped: its innermost line, in short."""
    if not dump["stack"]:
        return ""
    place: str = dump["stack"][-1].partition(" in ")[0]
    return place.rpartition("/")[2]


def _failed_to_agree(entries: Iterable[dict[str, Any]]) -> bool:
    """Return whether ranks that look alike have failed before they agreed, all of them."""
    return all(each["state"] == State.FAILED and not each["agreed_ns"] for each in entries)


def _wall_ns(dump: dict[str, Any], entry: dict[str, Any]) -> int:
    return int(dump["wall_clock_ns"] - dump["monotonic_ns"] + entry["began_ns"])


def _what(entry: dict[str, Any]) -> str:
    name = f" of {entry['name']!r}" if entry["name"] is not None else ""
    return " ".join([entry["kind"] + name, *entry["details"]])
