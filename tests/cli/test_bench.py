"""`mpistrat bench` and `make scaling`: the instruments, and never how fast anything is."""

import functools
import json
import math
from itertools import product

import pytest

from benchmarks import BENCHMARKS
from mpistrat.bench import BENCHMARKS as OF_PACKAGE
from mpistrat.testing import launch
from tests import ROOT
from tools.scaling.benchmark import BENCHMARK as SCALING
from tools.scaling.work import package_all_reduce

pytestmark = pytest.mark.launches

MEASURED = BENCHMARKS | {SCALING.name: SCALING}

DIFFERENCES = {"cost_s", "cost_ratio", "extra_s"}
"""What may be negative where the machine is noisy."""

OPTIONS = {
    "agreement": ["--sizes", "8", "4096"],
    "allreduce": ["--all", "--sizes", "8", "4096"],
    "gradients": [],
    "overlap": ["--sizes", "65536"],
    "scaling": ["--sizes", "8", "4096"],
    "step": [],
}


def bench(name, *options, ranks=2, env=None):
    program = ["mpistrat", "bench", name]
    if name not in OF_PACKAGE or "--best" in options:
        program = ["benchmarks", name] if name in BENCHMARKS else ["tools.scaling"]
    # Open MPI gives rank 0 a terminal, where tables are folded.
    variables = {"COLUMNS": "1000", **(env or {})}
    return launch.run(["-m", *program, *options], ranks, 120, cwd=ROOT, env=variables)


def numbers(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item, path)
    elif isinstance(value, int | float):
        yield path, value


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function: the name of a benchmark, what it printed and the report it wrote."""

    @functools.cache
    def run_of(name):
        folder = tmp_path_factory.mktemp(name)
        files = ["--output", folder / "report.json", "--plot", folder / "picture.png"]
        done = bench(name, *OPTIONS[name], "--samples", "1", *files)
        assert done.returncode == 0, done.stderr
        assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
        return name, done.stdout, json.loads((folder / "report.json").read_text())

    return run_of


@pytest.fixture(params=OPTIONS)
def run(request, run_of):
    return run_of(request.param)


def test_the_report_says_what_was_measured_and_where(run):
    name, printed, report = run
    assert report["benchmark"] == name
    assert (report["num_ranks"], report["num_nodes"], report["samples"]) == (2, 1, 1)
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert {"mpistrat", "python", "numpy", "mpi4py"} <= report["versions"].keys()
    assert report["mpi_library"] in printed
    for note in report["notes"]:
        assert note in printed


def test_every_figure_is_finite_and_every_time_positive(run):
    name, _, report = run
    found = {table.key: report.get(table.key, []) for table in MEASURED[name].tables}
    assert found["results"]
    for path, value in numbers(found):
        assert math.isfinite(value), path
        if path[-1] not in DIFFERENCES:
            assert value >= 0, path
        if path[0] == "results" and path[-1].endswith("_s") and path[-1] not in DIFFERENCES:
            assert value > 0, path


def test_every_column_is_printed(run):
    name, printed, report = run
    for table in MEASURED[name].tables:
        if report.get(table.key):
            assert table.title in printed
            assert all(column.title in printed for column in table.all_columns)


def test_the_sizes_are_those_that_were_asked_for(run):
    name, _, report = run
    if MEASURED[name].sizes:
        found = {row["num_bytes"] for row in report["results"]}
        assert found == {int(size) for size in OPTIONS[name] if size.isdecimal()}


def test_allreduce_says_what_moved_the_array(run_of):
    _, _, report = run_of("allreduce")
    assert all(row["implementation"] for row in report["results"])


def test_allreduce_has_five_columns_that_fit_a_terminal():
    done = bench("allreduce", "--sizes", "8", "1048576", "--samples", "1")
    assert done.returncode == 0, done.stderr
    _, titles, *rows = done.stdout.splitlines()
    assert titles.split() == ["size", "mpi4py", "mpistrat", "speed-up", "how"]
    assert len(rows) == 2
    assert all(len(line) <= 100 for line in (titles, *rows))


def test_what_crosses_memory_is_counted(run_of):
    _, _, report = run_of("allreduce")
    for row in report["results"]:
        # Two ranks: each brings its numbers, reads those of both, and writes the result.
        if row["implementation"] == "Piggyback":
            assert row["moved_bytes"] == 4 * row["num_bytes"]
            assert row["memory_share"] > 0


def test_best_tries_the_settings_of_the_library():
    sizes = ["--sizes", "8", "65536"]
    done = bench("allreduce", "--best", "--samples", "1", "--json", *sizes, ranks=None)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_ranks"] == 2
    assert [row["num_bytes"] for row in report["results"]] == [8, 65536]
    for row in report["results"]:
        assert len(row["all"]) >= 8  # each setting, as it is and in place
        assert {"default", "default, in place"} < row["all"].keys()
        assert row["best_s"] == row["all"][row["best"]] == min(row["all"].values())
        assert row["ratio"] == pytest.approx(row["best_s"] / row["ours_s"])
    assert "left out" not in "".join(report["notes"])


def test_best_starts_its_ranks_itself():
    done = bench("allreduce", "--best")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert done.stderr.count("--best starts the ranks itself: run it without mpiexec") == 1


def test_overlap_cannot_beat_the_longer_of_the_two(run_of):
    _, _, report = run_of("overlap")
    assert len(report["results"]) == 4
    best = [row["best_over_sum"] for row in report["results"] if "best_over_sum" in row]
    assert len(best) == 2
    assert all(0.5 <= each <= 1 for each in best)


def test_scaling_counts_the_bytes_of_raw_mpi_by_the_textbook(run_of):
    _, _, report = run_of("scaling")
    raw = [row for row in report["results"] if row["way"] == "raw Allreduce"]
    found = [(row["num_ranks"], row["num_bytes"], row["bytes_sent"]) for row in raw]
    assert found == [(1, 8, 0), (1, 4096, 0), (2, 8, 8), (2, 4096, 4096)]


@pytest.mark.skipif(launch.is_open_mpi(), reason="MPICH alone can be made to see two nodes")
def test_between_nodes_the_package_sends_what_the_model_says():
    two_nodes = {"MPIR_CVAR_NUM_CLIQUES": "2"}
    options = ["--sizes", "8", "65536", "--samples", "1", "--json"]
    done = bench("scaling", *options, env=two_nodes)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_nodes"] == 2
    rows = [row for row in report["results"] if (row["num_ranks"], row["way"]) == (2, "all_reduce")]
    for row in rows:
        work = package_all_reduce(2, row["num_bytes"])
        assert (row["messages"], row["bytes_sent"]) == (work.messages, work.bytes_sent)


def test_step_without_torch_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    done = bench("step", "--samples", "1", "--json", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["results"]] == ["ours", "hand", "packed", "run"]
    assert "not installed on every rank" in report["notes"][0]


def test_one_rank_alone_counts_and_predicts_nothing():
    done = bench("scaling", "--sizes", "8", "--samples", "1", "--json", ranks=None)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {row["bytes_sent"] for row in report["results"]} == {0}
    assert "predictions" not in report
    assert "nothing predicted" in report["notes"][0]


IN_SMALL = """
import sys
sys.path.insert(0, {root!r})
from {package} import {module}
from benchmarks.__main__ import main
{module}.{constant} = {value}
sys.exit(main(["{benchmark}", "--samples", "1", "--json"]))
"""


def bench_in_small(folder, ranks, benchmark, **names):
    """Return the rows of a benchmark that no option makes smaller."""
    program = IN_SMALL.format(root=str(ROOT), benchmark=benchmark, **names)
    done = launch.run(["-c", program], ranks, 120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


def test_optimizers_are_measured(tmp_path):
    layouts = {"one array": ((4096,),), "three": ((64, 32), (32,), ())}
    names = {"package": "benchmarks", "module": "optimizers", "constant": "_LAYOUTS"}
    rows = bench_in_small(tmp_path, 1, "optimizers", **names, value=layouts)
    rules = {"SGD", "SGD, momentum", "Adam", "AdamW"}
    assert {(row["optimizer"], row["layout"]) for row in rows} == set(product(rules, layouts))
    assert all(row["ours_s"] > 0 for row in rows)


def test_checkpoints_are_measured_and_leave_no_files(tmp_path):
    models = {"one": ((300, 300),), "three": ((64, 32), (32,), (1,))}
    names = {"package": "mpistrat.bench", "module": "checkpointing", "constant": "_MODELS"}
    rows = bench_in_small(tmp_path, 2, "checkpoint", **names, value=models)
    peers = ["h5py and fsync", "h5py and fsync", "copy", "h5py", "h5py", "read"]
    assert [(row["model"], row["peer"]) for row in rows] == list(product(models, peers))
    assert all(row["ours_s"] > 0 and row["ours_over_hand"] > 0 for row in rows)
    restores = [row for row in rows if row["what"].startswith("restore")]
    assert all(row["ours_over_in_place"] > 0 for row in restores)
    assert all(row["ours_over_safetensors"] > 0 for row in restores)
    assert not list(tmp_path.iterdir())


def test_output_is_measured_and_leaves_no_files(tmp_path):
    names = {"package": "mpistrat.bench", "module": "hdf5_output", "constant": "_ROWS"}
    rows = bench_in_small(tmp_path, 2, "output", **names, value=5000)
    assert {"gzip 4 and shuffle", "uncompressed", "contiguous"} <= {row["what"] for row in rows}
    assert {"h5py on one rank", "gather, SWMR", "pwrite, 2 fdatasync"} == {
        row["peer"] for row in rows
    }
    assert all(row["ours_s"] > 0 and row["ours_over_hand"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


BAD_ARGUMENTS = {
    "--samples must be at least 1, not 0.": ["--samples", "0"],
    "--ranks is for --best.": ["--ranks", "4"],
    "--ranks must be at least 2, not 1.": ["--best", "--ranks", "1"],
    "--best is for allreduce, not for step.": ["step", "--best"],
    "multiples of 4, not 6.": ["--sizes", "8", "6"],
    "gradients does not measure different sizes": ["gradients", "--sizes", "8"],
    "gradients reads no examples": ["gradients", "--examples", "8"],
    "--examples must be at least 1, not 0.": ["data", "--examples", "0"],
    "x.json cannot be written": ["--output", "no/such/folder/x.json"],
    "/ cannot be written": ["--plot", "/"],
}
EACH_REFUSAL = """
import json, sys
from benchmarks.__main__ import main
for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    assert code == 2, (arguments, code)
"""


def test_bad_arguments_are_refused_by_all_ranks_and_reported_once():
    arguments = json.dumps(list(BAD_ARGUMENTS.values()))
    done = launch.run(["-c", EACH_REFUSAL, arguments], 2, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [done.stderr.count(complaint) for complaint in BAD_ARGUMENTS] == [1] * len(BAD_ARGUMENTS)


@pytest.mark.parametrize(
    ("program", "known"), [(["mpistrat", "bench"], OF_PACKAGE), (["benchmarks"], BENCHMARKS)]
)
def test_every_benchmark_is_a_choice_of_its_command(program, known):
    choices = ", ".join(sorted(known))
    text = launch.run(["-m", *program, "--help"], cwd=ROOT).stdout
    assert f"one of {choices} (default: allreduce)" in " ".join(text.split())


def test_the_installed_command_refuses_races():
    done = launch.run(["-m", "mpistrat", "bench", "step"])
    assert done.returncode == 2
    assert "invalid choice: 'step'" in done.stderr


def test_allreduce_is_compared_with_both_raw_calls(run_of):
    _, printed, report = run_of("allreduce")
    assert "speed-up over in place" in printed
    for row in report["results"]:
        assert {"raw_s", "in_place_s", "ours_s", "ratio", "in_place_ratio"} <= row.keys()
    assert report["machine"]["cpu"]


ON_DEVICES = {"PYTHONPATH": str(ROOT / "tests" / "standin"), "MPISTRAT_SHARE_GPUS": "on"}


FEW_PARAMETERS = """
import sys
from benchmarks import __main__, optimizers
optimizers._LAYOUTS = {"one array": ((1000,),), "two arrays": ((9, 5), (7,))}
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("name", ["allreduce", "gradients", "optimizers"])
def test_arrays_on_devices(name, tmp_path):
    options = ["--sizes", "8", "4096"] if name == "allreduce" else []
    options += ["--device", "gpu", "--samples", "1", "--output", tmp_path / "report.json"]
    if name == "optimizers":  # the 25.6 million of the report take the stand-in half a minute
        program = ["-c", FEW_PARAMETERS, name, *options]
        done = launch.run(program, 2, 120, cwd=ROOT, env={"COLUMNS": "1000", **ON_DEVICES})
    else:
        done = bench(name, *options, env=ON_DEVICES)
    assert done.returncode == 0, done.stderr
    assert "arrays on gpu" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == "gpu"
    for row in report["results"]:
        assert row["ours_s"] > 0
    if name != "optimizers":
        assert "Stand-in" in report["notes"][0]


def test_what_runs_on_the_host_refuses_devices():
    done = bench("step", "--device", "gpu", env=ON_DEVICES)
    assert done.returncode == 2
    assert done.stderr.strip() == "mpistrat bench: step runs on the host: leave out --device."


def test_a_device_that_is_not_there():
    done = bench("allreduce", "--device", "gpu:3")
    assert done.returncode == 2
    assert "asks for GPU 3" in done.stderr
