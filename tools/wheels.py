"""Wheels of the package for Linux on x86_64 and aarch64: ``python -m tools.wheels``.

One wheel for each processor serves every Python from 3.10 on. That for this machine's processor is
compiled here, and the other one by zig, which has the libraries of both, old ones too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
"""The oldest that the wheels run with, that of manylinux2014."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check and list the wheels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder (%(default)s)")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="default: both")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = build_source(Path(folder))
        made = [source]
        for machine in arguments.machine or MACHINES:
            raw = build(source, machine, Path(folder) / machine)
            made.append(with_tags(raw, machine, Path(folder) / "tagged"))
        run("twine", "check", "--strict", *map(str, made))
        arguments.output.mkdir(parents=True, exist_ok=True)
        for path in made:
            shutil.copy(path, arguments.output)
            print(f"{arguments.output / path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


def build_source(folder: Path) -> Path:
    """Return the source archive, from which the wheels are built."""
    run("build", "--sdist", "--outdir", str(folder), ".")
    (path,) = folder.glob("*.tar.gz")
    return path


def build(source: Path, machine: str, folder: Path) -> Path:
    """Return a wheel for a kind of machine, not yet named for the systems that it runs on."""
    environment = {"MPISTRAT_REQUIRE_COMPILED": "1"}  # an error, not a wheel without them
    if machine != platform.machine() or not shutil.which(os.environ.get("CC", "cc")):
        environment |= cross_compiler(machine)
    run("pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(source), env=environment)
    (path,) = folder.glob("*.whl")
    return path


def cross_compiler(machine: str) -> dict[str, str]:
    """Return the variables with which setuptools compiles for another machine."""
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    return {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "CFLAGS": "-g0",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": ".abi3.so",
    }


def with_tags(wheel: Path, machine: str, folder: Path) -> Path:
    """Return the wheel under the name of the oldest systems that have what it needs."""
    before = set(folder.glob("*.whl"))
    run("auditwheel", "repair", "--wheel-dir", str(folder), str(wheel))
    (path,) = set(folder.glob("*.whl")) - before
    if f"manylinux2014_{machine}" not in path.name and f"_2_17_{machine}" not in path.name:
        print(f"{path.name} needs a newer glibc than {GLIBC}", file=sys.stderr)
    run("abi3audit", "--strict", str(path))
    return path


def run(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run ``python -m module`` to its end, or end this program with its output."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
