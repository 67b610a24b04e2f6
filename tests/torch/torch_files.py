"""Runs files of torch's own tests on gloo and on mpistrat, and compares the outcomes.

``python tests/torch/torch_files.py FOLDER [-k PART] FILE ...`` prints a table. FOLDER is
``test/distributed`` of PyTorch's source, such as that of Debian's source package.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mpistrat.testing import launch

PROGRAM = Path(__file__).parent / "programs" / "torch_files.py"
START_S = 60
"""How long a job may take to import its file."""
GRACE_S = 20
"""How long the other ranks may take after one has failed."""


@dataclass
class Outcome:
    """What became of one test: of all ranks the worst."""

    outcome: str
    why: str = ""
    num_groups: int = 0
    took_s: float = 0


def listed(file, env):
    """Return the tests of a file, each with its number of ranks, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tests.json")
        program = launch.Launched(
            ["-W", "ignore", PROGRAM, file, "--list"], None, env={**env, "RESULTS": str(path)}
        )
        try:
            program.wait(120)
        except subprocess.TimeoutExpired:
            program.kill()
        if not path.exists():
            last = program.stderr().strip().splitlines()[-1:]
            return {}, last[0] if last else "no tests"
        return json.loads(path.read_text()), ""


def results_of(folder, ranks):
    """Return the outcomes so far: one list per rank."""
    found = []
    for rank in range(ranks):
        path = Path(folder, f"{rank}.jsonl")
        text = path.read_text() if path.exists() else ""
        found.append([json.loads(line) for line in text.split("\n")[:-1]])
    return found


def combined(of_ranks):
    """Return the worst outcome of the ranks, as torch's own runner counts them."""
    failed = [each for each in of_ranks if each[1] == "failed"]
    worst = failed[0] if failed else of_ranks[0]
    groups = max(each[2] for each in of_ranks)
    return Outcome(worst[1], worst[3], groups, max(each[4] for each in of_ranks))


def wait_for(program, folder, ranks, count, limit_s):
    """Wait until each rank has run `count` tests, until one of them hangs, or for the end."""
    end, before = time.monotonic() + START_S + limit_s, [0] * ranks
    while program.process.poll() is None and time.monotonic() < end:
        results = results_of(folder, ranks)
        lengths = [len(each) for each in results]
        done = min(lengths)
        if done == count:
            return
        if lengths != before:
            failed = any(len(each) > done and each[done][1] == "failed" for each in results)
            before, end = lengths, time.monotonic() + (GRACE_S if failed else limit_s)
        time.sleep(0.1)


def run_once(file, ranks, names, env, limit_s):
    """Run tests until one hangs, and return the outcomes of those that were run."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "names")
        asked.write_text("\n".join(names))
        program = launch.Launched(
            ["-W", "ignore", PROGRAM, file, f"@{asked}"], ranks, env={**env, "RESULTS": folder}
        )
        try:
            wait_for(program, folder, ranks, len(names), limit_s)
        finally:
            ended, text = program.process.poll(), program.stderr()[-3000:]
            program.kill()
        results = results_of(folder, ranks)
    outcomes = {}
    for number, name in enumerate(names):
        of_ranks = [each[number] for each in results if len(each) > number]
        if len(of_ranks) == ranks:
            outcomes[name] = combined(of_ranks)
            continue
        failed = [each for each in of_ranks if each[1] == "failed"]
        if failed:
            outcomes[name] = combined(failed)
        else:
            missing = [rank for rank, each in enumerate(results) if len(each) <= number]
            what = f"ended with {ended}" if ended is not None else f"ranks {missing} hang"
            outcomes[name] = Outcome("failed", f"{what}\n{text}")
        break
    return outcomes


def run(file, tests, env, limit_s=90):
    """Run tests of a file, with a new job after one that hangs, and return their outcomes."""
    outcomes = {}
    for ranks in sorted({*tests.values()}):
        pending = [name for name in tests if tests[name] == ranks]
        while pending:
            found = run_once(file, ranks, pending, env, limit_s)
            outcomes |= found
            pending = [name for name in pending if name not in found]
            print(f"{file.name} {env['BACKEND']}: {len(outcomes)} of {len(tests)}", file=sys.stderr)
    return outcomes


def compare(file, folder, part="", known=None):
    """Return the outcomes on gloo, and those on mpistrat of what passes on gloo."""
    env = {"TORCH_TESTS": str(folder.parent), "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    tests, why = listed(file, env)
    tests = {name: ranks for name, ranks in tests.items() if part in name}
    if not tests:
        return {}, {}, why
    on_gloo = known or run(file, tests, {**env, "BACKEND": "gloo"})
    passed = {
        name: tests[name]
        for name, each in on_gloo.items()
        if each.outcome == "passed" and each.num_groups
    }
    env["BACKEND"] = "mpistrat"
    on_mpistrat = run(file, passed, env)
    # A second time without the others, which may have left something behind.
    failed = {name: passed[name] for name, each in on_mpistrat.items() if each.outcome == "failed"}
    return on_gloo, on_mpistrat | run(file, failed, env), ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("-k", default="", help="only tests whose names have this part")
    parser.add_argument("--json", type=Path, help="file to add all outcomes to, one line per file")
    options = parser.parse_args()
    # The jobs are in sessions of their own, and end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print("| file | tests | passed on gloo | of these on mpistrat |\n|---|---|---|---|")
    failed = False
    for file in options.files:
        began = time.monotonic()
        on_gloo, on_mpistrat, why = compare(options.folder / file, options.folder, options.k)
        passed = [each for each in on_mpistrat.values() if each.outcome == "passed"]
        failed |= len(passed) < len(on_mpistrat)
        print(f"| {file} | {len(on_gloo)} | {len(on_mpistrat)} | {len(passed)} | {why}", flush=True)
        for name, each in on_mpistrat.items():
            if each.outcome != "passed":
                last = (each.why.strip().splitlines() or [""])[-1]
                print(f"  {name}: {each.outcome}: {last[:300]}", flush=True)
        if options.json:
            record = [
                {name: vars(each) for name, each in found.items()}
                for found in (on_gloo, on_mpistrat)
            ]
            with options.json.open("a") as out:
                took_s = round(time.monotonic() - began)
                out.write(json.dumps([file, why, took_s, *record]) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
