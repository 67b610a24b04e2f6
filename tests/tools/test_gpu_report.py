"""The report of a machine's GPUs, run for real on one that has none."""

import getpass
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tools import gpu_report
from tools.gpu_report import Gpu, Part


def test_gpus_are_read_from_the_table_of_nvidia_smi():
    table = "NVIDIA H200, 143771 MiB, 570.86.15\nNVIDIA A100-SXM4-40GB, 40960 MiB, 570.86.15\n"
    assert gpu_report.read_gpus(table) == [
        Gpu("NVIDIA H200", "143771 MiB", "570.86.15"),
        Gpu("NVIDIA A100-SXM4-40GB", "40960 MiB", "570.86.15"),
    ]
    assert gpu_report.read_gpus("No devices were found\n") == []


def test_a_part_that_fails_or_hangs_is_a_finding():
    failed = gpu_report.run(Part("fails", [sys.executable, "-c", "print('no'); exit(3)"], 30))
    assert (failed.verdict, failed.output) == ("exit code 3", "no\n")
    hung = gpu_report.run(Part("hangs", [sys.executable, "-c", "import time; time.sleep(99)"], 1))
    assert hung.verdict == "time limit"
    assert hung.seconds < 30


def test_long_outputs_are_shown_from_their_end():
    part = Part("long", ["seq", "1000"], 30)
    page = gpu_report.section(part, gpu_report.run(part))
    assert "... 800 lines\n801\n" in page
    assert page.endswith("1000\n```\n")


def test_a_page_names_neither_user_nor_host_nor_folders():
    page = f"{socket.gethostname()}:{ROOT}/a {Path.home()}/b {getpass.getuser()}"
    assert gpu_report.without_names(page) == "HOST:CHECKOUT/a ~/b USER"


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="for machines without a GPU")
def test_without_a_gpu_the_host_is_tried_and_it_is_said(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tools.gpu_report",
        "--quick",
        "--output",
        tmp_path / "page.md",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There is no GPU here" in done.stdout
    page = (tmp_path / "page.md").read_text()
    assert "**All parts passed.**" in page
    assert "smoke: all is well on 2 ranks" in page
    for title in ("Topology", "MPI and GPU memory", "Tests, 1 rank", "Tests, 2 ranks"):
        assert f"## {title}\n\nNot tried: there is no GPU.\n" in page
    assert "## allreduce on the host: ok" in page
