"""Figures in the pages, all of one recorded run of the benchmarks.

    python -m tools.figures            # name each page that has other figures, and fail
    python -m tools.figures --write    # write the figures into the pages
    python -m tools.figures --record   # first run the benchmarks again: half an hour, nothing else

The run is in ``docs/benchmarks/figures.json``. `SENTENCES` has each sentence with figures, `TABLES`
the tables of the benchmark pages. The picture of reading is drawn from the same run.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import STAGES
from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.text import readable_size, readable_time
from mpistrat.testing import launch

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "benchmarks" / "figures.json"

RUNS = {
    "agreement, 2 ranks": (2, ["mpistrat", "bench", "agreement", "--samples", "15"]),
    "data, 1 rank": (1, ["benchmarks", "data", "--samples", "5"]),
    "data, 2 ranks": (2, ["benchmarks", "data", "--samples", "5"]),
    "2 GB of data, 2 ranks": (
        2,
        ["mpistrat", "bench", "data", "--examples", "650000", "--samples", "3"],
    ),
    "checkpoint, 1 rank": (1, ["mpistrat", "bench", "checkpoint", "--samples", "5"]),
    "checkpoint, 2 ranks": (2, ["mpistrat", "bench", "checkpoint", "--samples", "5"]),
    "output, 2 ranks": (2, ["mpistrat", "bench", "output", "--samples", "9"]),
    "scaling, 2 nodes": (2, ["tools.scaling"]),
    "machine": (1, ["benchmarks.machine", "--memory", "6"]),  # it starts its ranks itself
}
"""Number of ranks and arguments of ``python -m`` for each benchmark."""

SIMULATED_NODES = {"scaling, 2 nodes": {"MPIR_CVAR_NUM_CLIQUES": "2"}}
"""Variables that make MPICH treat the ranks of a run as so many nodes."""

Reports = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Sentence:
    """A sentence with figures, each in braces; spaces also stand for the ends of lines."""

    page: str
    text: str

    def pattern(self) -> str:
        """Return a regular expression that finds the sentence, whatever its figures are."""
        parts = [
            r"(\S+?)" if part.startswith("{") else re.sub(r"(\\ )+", r"\\s+", re.escape(part))
            for part in re.split(r"(\{[^}]*\})", self.text)
        ]
        return "".join(parts) + r"(?!\w)"

    def names(self) -> list[str]:
        """Return the names of the figures in it."""
        return re.findall(r"\{([^}]*)\}", self.text)


@dataclass(frozen=True)
class Table:
    """A table between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``."""

    page: str
    name: str
    lines: Callable[[Reports], Iterator[str]]


def figures(reports: Reports) -> dict[str, str]:
    """Return the figures that sentences name."""
    agreement = {row["num_bytes"]: row for row in reports["agreement, 2 ranks"]["results"]}
    return {
        "us per call": f"{agreement[8]['cost_s'] * 1e6:.1f}",
        "8 B, times as long": f"{1 + agreement[8]['cost_ratio']:.1f}",
        "1 MiB, %": _at_most_percent(agreement[2**20]["cost_ratio"]),
        "16 MiB, %": _at_most_percent(agreement[2**24]["cost_ratio"]),
        **{
            f"gzip, {ranks}": _two_digits(
                _rate(reports, f"data, {ranks}", "mpistrat, shuffled, gzip")
            )
            for ranks in ("1 rank", "2 ranks")
        },
        "gzip, h5py %": _two_digits(
            100 * _rate(reports, "data, 2 ranks", "h5py, sorted index arrays, gzip")
        ),
        **{
            f"{row['what']}, first ms": f"{1e3 * row['first_s']:.0f}"
            for row in reports["data, 1 rank"]["first batches"]
        },
    }


SENTENCES = (
    Sentence(
        "README.md",
        "an `all_reduce` of 8 bytes about {8 B, times as long} times as long, one of 1 MiB at most "
        "{1 MiB, %} % and one of 16 MiB at most {16 MiB, %} % longer",
    ),
    Sentence(
        "README.md",
        "{gzip, 1 rank} to {gzip, 2 ranks} times the rate of h5py, which decodes on one core, "
        "reading it in order",
    ),
    Sentence(
        "docs/why.md",
        "about {us per call} µs per call: 8 bytes take {8 B, times as long} times as long, 16 MiB "
        "at most {16 MiB, %} % longer",
    ),
    Sentence("docs/why.md", "at about {gzip, h5py %} % of the rate of file order"),
    Sentence("docs/why.md", "at {gzip, 1 rank} to {gzip, 2 ranks} times the rate of file order"),
    Sentence("docs/concepts/collectives.md", "it takes about {us per call} µs"),
    Sentence("docs/coming-from/mpi4py.md", "costs about {us per call} µs per call"),
    Sentence(
        "docs/coming-from/hdf5.md",
        "{gzip, 1 rank} to {gzip, 2 ranks} times the rate of h5py reading",
    ),
    Sentence("docs/howto/speed.md", "[about {us per call} µs](../benchmarks/agreement.md)"),
    Sentence(
        "docs/benchmarks/data.md",
        "comes after {gzip, first ms} ms (gzip), {lz4, first ms} (lz4) and {chunks, first ms} "
        "(chunks) on one rank",
    ),
    Sentence("docs/benchmarks/agreement.md", "{us per call} us of a repeated call of 8 B"),
)


def _agreement(reports: Reports) -> Iterator[str]:
    yield "| array | with checks | without | the checks take |"
    yield "|---|---|---|---|"
    for row in reports["agreement, 2 ranks"]["results"]:
        times = map(readable_time, (row["checked_s"], row["unchecked_s"]))
        percent = f"{max(100 * row['cost_ratio'], 0):.0f} % of that"
        yield _line(readable_size(row["num_bytes"]), *times, percent)


def _data(reports: Reports) -> Iterator[str]:
    yield "| read by | 1 rank: one epoch | rate / scan | 2 ranks: one epoch | rate / scan |"
    yield "|---|---|---|---|---|"
    for what in [row["what"] for row in reports["data, 1 rank"]["results"]]:
        rows = [_row(reports, run, what) for run in ("data, 1 rank", "data, 2 ranks")]
        cells = [(readable_time(row["pass_s"]), _two_digits(row["rate_over_scan"])) for row in rows]
        yield _line(what, *(each for pair in cells for each in pair))


def _large_data(reports: Reports) -> Iterator[str]:
    run = "2 GB of data, 2 ranks"
    yield "| read by, 2 ranks | 61 MB of images | 2 GB of images |"
    yield "|---|---|---|"
    for what in [row["what"] for row in reports[run]["results"]]:
        if what.startswith("mpistrat") or "sorted" in what:
            rates = (_rate(reports, each, what) for each in ("data, 2 ranks", run))
            yield _line(what, *map(_two_digits, rates))


def _checkpoint(reports: Reports) -> Iterator[str]:
    yield "| operation | model | peer | 1 rank: speed-up | 2 ranks: speed-up |"
    yield "|---|---|---|---|---|"
    runs = [reports[f"checkpoint, {ranks}"]["results"] for ranks in ("1 rank", "2 ranks")]
    for rows in zip(*runs, strict=True):
        peers = {"hand": rows[0]["peer"], "in_place": "h5py, in place"}
        for key, peer in (peers | {"safetensors": "safetensors"}).items():
            name = f"ours_over_{key}"
            if all(name in row for row in rows):
                speed_ups = (_two_digits(1 / row[name]) for row in rows)
                yield _line(rows[0]["what"], rows[0]["model"], peer, *speed_ups)


def _output(reports: Reports) -> Iterator[str]:
    yield "| file | peer | speed-up | over `pwrite` by all ranks | stored bytes / h5py's |"
    yield "|---|---|---|---|---|"
    for row in reports["output, 2 ranks"]["results"]:
        speed_ups = (row.get("ours_over_hand"), row.get("ours_over_raw"))
        cells = ["" if each is None else _two_digits(1 / each) for each in speed_ups]
        stored = row.get("stored_ratio")
        cells.append("" if stored is None else f"{stored:.2f}")
        yield _line(row["what"], row["peer"], *cells)


def _output_files(reports: Reports) -> Iterator[str]:
    yield "| fact | value |"
    yield "|---|---|"
    for row in reports["output, 2 ranks"]["facts"]:
        value = row["value"]
        yield _line(row["fact"], f"{value:.0f}" if value == int(value) else f"{value:.2f}")


def _six(reports: Reports) -> Iterator[str]:
    values, run = figures(reports), "2 GB of data, 2 ranks"
    large = _two_digits(_rate(reports, run, "mpistrat, shuffled, gzip"))
    agreement, data, checkpoints = (
        f"[{name}](benchmarks/{name}.md)" for name in ("agreement", "data", "checkpoints")
    )
    yield "| what | figure | how it is measured |"
    yield "|---|---|---|"
    checks = "checks of a repeated `all_reduce` of 8 bytes"
    yield _line(checks, f"{values['us per call']} µs per call", agreement)
    checks = "the same for 16 MiB"
    yield _line(checks, f"at most {values['16 MiB, %']} % longer than without", agreement)
    for size, rate in (("61 MB", values["gzip, 2 ranks"]), ("2 GB", large)):
        what = f"shuffled batches from {size} of images in HDF5 with gzip"
        yield _line(what, f"{rate} times the rate of h5py reading in order on one core", data)
    rows = {
        row["what"]: row
        for row in reports["checkpoint, 2 ranks"]["results"]
        if row["model"].startswith("161 arrays")
    }
    for operation, what in (
        ("save", "saving 102 MB in 161 arrays"),
        ("restore, warm", "restoring it, with all checksums compared"),
    ):
        speed_up = _two_digits(1 / rows[operation]["ours_over_hand"])
        yield _line(what, f"speed-up of {speed_up} over {rows[operation]['peer']}", checkpoints)


def _fitted(reports: Reports) -> Iterator[str]:
    (fit,) = reports["scaling, 2 nodes"]["constants"]
    yield "| o, a call | L, a message | 1 / G, sent | 1 / g, reduced | error of the fit |"
    yield "|---|---|---|---|---|"
    times = (readable_time(fit[name]) for name in ("call_s", "message_s"))
    rates = (fit[f"{name}_s_per_byte"] for name in ("sent", "reduced"))
    rates = (f"{1e-9 / each:.1f} GB/s" for each in rates)
    yield _line(*times, *rates, f"{100 * fit['relative_error']:.0f} %")


def _predicted(reports: Reports) -> Iterator[str]:
    rows = reports["scaling, 2 nodes"]["predictions"]
    rows = [row for row in rows if row["links"] != "as measured"]
    nodes = sorted({row["num_nodes"] for row in rows})
    yield _line("one `all_reduce`", *(f"{each:,} nodes" for each in nodes), "most of the time")
    yield "|---" * (len(nodes) + 2) + "|"
    for size in sorted({row["num_bytes"] for row in rows}):
        cells = [row for row in rows if row["num_bytes"] == size]
        rules = {row["rules"] for row in cells}
        times = (readable_time(row["predicted_s"]) for row in cells)
        yield _line(readable_size(size), *times, ", ".join(sorted(rules)))


_OF_A_RANK = {
    "opens": "files opened",
    "looks": "looked for",
    "descriptors": "descriptors",
    "sockets": "sockets",
    "threads": "threads",
    "anonymous": "own memory",
    "page_tables": "page tables",
}
"""What the page of the machine lists per rank, by its key in the report."""


def _of_a_rank(reports: Reports) -> Iterator[str]:
    rows = reports["machine"]["results"]
    yield _line("what a rank does", "ranks", *_OF_A_RANK.values())
    yield "|---" * (len(_OF_A_RANK) + 2) + "|"
    for stage, title in STAGES.items():
        row = max((row for row in rows if row["stage"] == stage), key=lambda row: row["num_ranks"])
        cells = (_amount(key, row[key]) for key in _OF_A_RANK)
        yield _line(title, str(row["num_ranks"]), *cells)


def _growth(reports: Reports) -> Iterator[str]:
    rows = {(row["stage"], row["num_ranks"]): row for row in reports["machine"]["results"]}
    counts = sorted(num_ranks for stage, num_ranks in rows if stage == "strategy")
    yield _line("`MPIStrategy()` adds", *(f"{n} rank{'s' * (n > 1)}" for n in counts))
    yield "|---" * (len(counts) + 1) + "|"
    for key, title in _OF_A_RANK.items():
        added = (rows["strategy", n][key] - rows["plain", n][key] for n in counts)
        yield _line(f"{title}, per rank", *(_amount(key, each) for each in added))
    added = (
        rows["strategy", n]["shared_of_job"] - rows["plain", n]["shared_of_job"] for n in counts
    )
    yield _line("shared memory, of the job", *(readable_size(each) for each in added))


def _amount(key: str, value: float) -> str:
    is_size = key in ("anonymous", "page_tables", "shared_of_job")
    return readable_size(round(value)) if is_size else f"{value:,.0f}"


TABLES = (
    Table("docs/performance.md", "six figures", _six),
    Table("docs/benchmarks/scaling.md", "fitted constants", _fitted),
    Table("docs/benchmarks/scaling.md", "predictions", _predicted),
    Table("docs/benchmarks/agreement.md", "agreement", _agreement),
    Table("docs/benchmarks/data.md", "data", _data),
    Table("docs/benchmarks/data.md", "large data", _large_data),
    Table("docs/benchmarks/checkpoints.md", "checkpoint", _checkpoint),
    Table("docs/benchmarks/output.md", "output", _output),
    Table("docs/benchmarks/output.md", "output files", _output_files),
    Table("docs/benchmarks/machine.md", "one rank", _of_a_rank),
    Table("docs/benchmarks/machine.md", "growth", _growth),
)


def complaints(reports: Reports, root: Path = ROOT) -> Iterator[str]:
    """Yield each page whose figures are not those of the recorded run."""
    for page in sorted({each.page for each in (*SENTENCES, *TABLES)}):
        text = (root / page).read_text()
        for sentence in SENTENCES:
            if sentence.page == page and re.search(sentence.pattern(), text) is None:
                yield f"{page}: no sentence reads {sentence.text!r}"
        if written(page, text, reports) != text:
            yield f"{page}: other figures than those of the run; python -m tools.figures --write"


def written(page: str, text: str, reports: Reports) -> str:
    """Return the text of a page with the figures of the recorded run."""
    values = figures(reports)
    for sentence in SENTENCES:
        match = re.search(sentence.pattern(), text) if sentence.page == page else None
        if match is not None:
            spans = zip(match.regs[1:], sentence.names(), strict=True)
            for (begin, end), name in reversed(list(spans)):
                text = text[:begin] + values[name] + text[end:]
    for table in TABLES:
        if table.page == page:
            head, tail = f"<!-- figures: {table.name} -->\n", "<!-- end of figures -->"
            before, _, rest = text.partition(head)
            _, _, after = rest.partition(tail)
            text = "\n".join([before + head, *table.lines(reports), "", tail + after])
    return text


def record(runs: Sequence[str] = tuple(RUNS)) -> None:
    """Run benchmarks again, and keep their reports."""
    reports = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in runs:
        num_ranks, arguments = RUNS[name]
        print(f"recording {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            command = [*mpiexec(num_ranks), sys.executable, "-m", *arguments, "--output", str(path)]
            environment = launch.environment() | {"OMP_NUM_THREADS": "1"}
            environment |= SIMULATED_NODES.get(name, {})
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1800)
            reports[name] = json.loads(path.read_text())
            del reports[name]["machine"]["system"]
    RECORD.write_text(json.dumps(reports, indent=1) + os.linesep)


def _row(reports: Reports, run: str, what: str) -> Mapping[str, Any]:
    return next(row for row in reports[run]["results"] if row["what"] == what)


def _rate(reports: Reports, run: str, what: str) -> float:
    return float(_row(reports, run, what)["rate_over_scan"])


def _at_most_percent(ratio: float) -> str:
    return str(max(math.ceil(100 * ratio), 1))


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Check or write the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the figures into the pages")
    parser.add_argument(
        "--record", nargs="*", metavar="RUN", help=f"run again: {'; '.join(RUNS)} (default: all)"
    )
    arguments = parser.parse_args()
    if arguments.record is not None:
        record(arguments.record or tuple(RUNS))
    reports = json.loads(RECORD.read_text())
    if arguments.write or arguments.record is not None:
        for page in {each.page for each in (*SENTENCES, *TABLES)}:
            path = ROOT / page
            path.write_text(written(page, path.read_text(), reports))
    found = list(complaints(reports))
    print("\n".join(found) or "All figures are those of the recorded run.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
