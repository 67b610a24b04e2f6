"""What is compiled from C; metadata is in pyproject.toml.

The libraries are optional: without a C compiler the package works, more slowly.
"""

import hashlib
import os
import re
import runpy
import shutil
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

KERNELS = Path("mpistrat/optimizers/kernels.py")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
SOURCE = Path("build/host_kernels.c")
# For wheels, where it must not fail unseen.
OPTIONAL = not os.environ.get("MPISTRAT_REQUIRE_COMPILED")
# Of earlier builds for one Python alone, which Python would prefer.
STALE = [path for path in Path("mpistrat").rglob("*.so") if ".abi3." not in path.name]
NATIVE = sorted(Path("mpistrat/native").glob("*.[ch]"))
NATIVE_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in NATIVE)).hexdigest()


# Python runs this line at each start, so it only looks for one variable.
WATCH_PTH = (
    'import os; "MPISTRAT_WATCH_AFTER_S" in os.environ '
    'and __import__("mpistrat_watch_autostart").begin()\n'
)

RECORDER = Path("mpistrat/native/recorder")


def recorder(name, macros):
    """Return the recorder of `mpistrat watch`, which uses nothing of Python nor of an MPI library.

    mpi4py looks whether the functions of MPI 4, and those for large counts, exist. So there are
    three recorders: for libraries with both, with those of MPI 4 (Open MPI 5), and with neither.
    """
    return Extension(
        f"mpistrat.watch.{name}",
        [str(path) for path in sorted(RECORDER.glob("*.c"))],
        depends=[str(path) for path in RECORDER.glob("*.h")],
        define_macros=macros,
        extra_compile_args=["-O2", "-fvisibility=hidden", "-Wno-unused-parameter"],
        libraries=["dl", "pthread"],
        py_limited_api=True,
        optional=OPTIONAL,
    )


PAGES = "https://github.com/mpistrat/mpistrat/blob/main/"
FILES = "https://raw.githubusercontent.com/mpistrat/mpistrat/main/"


def readme():
    """Return the README with addresses that lead somewhere from a page of an index, too."""
    text = Path("README.md").read_text()
    text = re.sub(r'(src(?:set)?=")(?=docs/)([^"]+)', rf"\1{FILES}\2?sanitize=true", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({PAGES}", text)


class BuildPackage(build_py):
    """Leaves no file of an earlier build in the wheel: the digest of the C sources counts them."""

    def run(self):
        """Empty the folder, then build."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "mpistrat"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "mpistrat_watch.pth").write_text(WATCH_PTH)


class BuildKernels(build_ext):
    """Writes the source of the kernels first. Their library is no Python module."""

    def run(self):
        """Make the source, then build."""
        SOURCE.parent.mkdir(exist_ok=True)
        SOURCE.write_text(runpy.run_path(str(KERNELS))["c_source"]())
        for stale in STALE if self.inplace else ():
            stale.unlink()
        self.force = True
        super().run()

    def get_export_symbols(self, ext):
        """Return what must be visible besides the functions of the kernels, which all are."""
        return (
            []
            if ext.name.endswith(("kernels", "recorder", "recorder_4", "recorder_4_c"))
            else super().get_export_symbols(ext)
        )


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    # One wheel serves every Python from 3.10 on.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    ext_modules=[
        Extension(
            "mpistrat.optimizers._host_kernels",
            [str(SOURCE)],
            extra_compile_args=FLAGS,
            libraries=["m"],
            py_limited_api=True,  # it uses nothing of Python
            optional=OPTIONAL,
        ),
        Extension(
            "mpistrat._native",
            [str(path) for path in NATIVE if path.suffix == ".c"],
            depends=[str(path) for path in NATIVE],
            include_dirs=[numpy.get_include()],
            define_macros=[("MPISTRAT_DIGEST", f'"{NATIVE_DIGEST}"')],
            py_limited_api=True,
            extra_compile_args=FLAGS,
            optional=OPTIONAL,
        ),
        recorder("_recorder", []),
        recorder("_recorder_4", [("WITH_MPI_4", "1")]),
        recorder("_recorder_4_c", [("WITH_MPI_4", "1"), ("WITH_LARGE_COUNTS", "1")]),
    ],
)
