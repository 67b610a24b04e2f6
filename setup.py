"""The host kernels, made from ``mpistrat/optimizers/kernels.py``; metadata is in pyproject.toml.

The library is optional: without a C compiler the package works all the same, more slowly.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("mpistrat/optimizers/kernels.py")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
SOURCE = Path("build/host_kernels.c")


class BuildKernels(build_ext):
    """Writes the C source before it is compiled. The library is no Python module."""

    def run(self):
        """Make the source, then build."""
        SOURCE.parent.mkdir(exist_ok=True)
        SOURCE.write_text(runpy.run_path(str(KERNELS))["c_source"]())
        self.force = True
        super().run()

    def get_export_symbols(self, ext):
        """Return nothing: the functions are all exported, and there is no ``PyInit``."""
        return []


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "mpistrat.optimizers._host_kernels",
            [str(SOURCE)],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        )
    ],
)
