"""The page of GPU benchmarks, from what `tools.gpu_speed` has measured.

    python -m tools.gpu_page speed-1.json speed-2.json --machine "..." --output docs/benchmarks

It writes ``gpu.md`` and ``gpu.json`` there.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.system.text import readable_size, readable_time

_COPIES = {
    "to_host_page_locked": "to page-locked memory (what collectives and checkpoints do)",
    "to_host_pageable": "to fresh memory (what `numpy()` does)",
    "to_device": "to the device (CuPy copies through page-locked memory)",
}


def page(found: Sequence[Mapping[str, Any]], machine: str) -> str:
    """Return the Markdown of the page for runs on 1 and on 2 ranks."""
    alone, shared = found
    lines = [
        "# GPUs",
        "",
        "```sh",
        "make gpu-report",
        "```",
        "",
        f"One {alone['device'].rsplit(' ', 2)[0]}, {machine}.",
        "Medians of one run; the candidates took turns. On two ranks, both share the GPU: NCCL",
        "refuses that, so arrays go through host memory.",
        "",
        "## Sums of float32",
        "",
        "`staged` goes through page-locked buffers and the host; `MPI on the host` is an",
        "`Allreduce` of NumPy arrays, without any copy from the device.",
        "",
        _row("size", "staged, 1 rank", "NCCL, 1 rank", "MPI on the host, 1 rank", "staged, 2 ranks")
        + " MPI on the host, 2 ranks |",
        "|---|---|---|---|---|---|",
    ]
    for one, two in zip(alone["reductions"], shared["reductions"], strict=True):
        cells = [one["staged"], one["nccl"], one["mpi_host"], two["staged"], two["mpi_host"]]
        lines.append(_row(readable_size(one["bytes"]), *map(readable_time, cells)))
    lines += ["", "## Optimizer steps", ""]
    lines += [
        "`summed` is `apply_gradients` in `Strategy.run`, which also reduces the gradients of one",
        "rank; `step` takes gradients that are reduced already. PyTorch's step reduces nothing.",
        "Speed-ups are over PyTorch's fused kernel.",
        "",
        "| optimizer | parameters (float32) | step | summed | torch fused "
        "| speed-up of the step | of summed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in alone["optimizers"]:
        cells = [row["cross_replica"], row["in_run"], row["fused"]]
        ratios = [f"{row['fused'] / row[name]:.2f}" for name in ("cross_replica", "in_run")]
        lines.append(_row(row["optimizer"], row["layout"], *map(readable_time, cells), *ratios))
    lines += [
        "",
        "A step in `Strategy.run` is prepared by the first one: on an H100 it was 0.6 to 1.9",
        "times as fast as PyTorch's fused kernel. Outside of `run` a step is not prepared: Python",
        "takes about 30 us for each array, so with many small arrays a step reaches 0.12 to 0.39",
        "of the speed of PyTorch. One large array varies from run to run.",
        "",
        "## Copies, batches, checkpoints",
        "",
        "| 64 MiB from the device | 1 rank | 2 ranks |",
        "|---|---|---|",
    ]
    for name, text in _COPIES.items():
        lines.append(_row(text, *(_rate(2**26 / each["copies"][name]) for each in found)))
    lines += ["", "| shuffled HDF5, rate per rank | 1 rank | 2 ranks |", "|---|---|---|"]
    for device in ("gpu", "cpu"):
        rates = (_rate(each["batches"][f"shuffled_hdf5_to_{device}"]) for each in found)
        lines.append(_row("to the device" if device == "gpu" else "to host memory", *rates))
    lines += [
        "",
        "These are batches of 256 rows, 768 KiB. On an H100 the copy to the device adds about",
        "0.2 ms to each batch, whatever its size: calls of CUDA, and waits for Python's lock,",
        "which the reader and the program share. Batches of 1,024 rows reached 3.3 GB/s, and",
        "4.5 GB/s to the host.",
    ]
    lines += ["", "| checkpoint of 512 MiB | 1 rank | 2 ranks |", "|---|---|---|"]
    for key, text in {
        "write_from_gpu": "written from the device",
        "write_from_cpu": "written from host memory",
        "read_to_gpu": "restored to the device",
        "read_to_cpu": "restored to host memory",
    }.items():
        times = (readable_time(each["checkpoints"][key]) for each in found)
        lines.append(_row(text, *times))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def main() -> None:
    """Write the page and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("found", nargs=2, type=Path, help="of 1 rank and of 2 ranks")
    parser.add_argument("--machine", required=True, help="versions and cores, for the page")
    parser.add_argument("--output", required=True, type=Path, help="folder")
    arguments = parser.parse_args()
    found = [json.loads(path.read_text()) for path in arguments.found]
    (arguments.output / "gpu.md").write_text(page(found, arguments.machine))
    (arguments.output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
