"""What is compiled from C; metadata is in pyproject.toml.

The libraries are optional: without a C compiler the package works all the same, more slowly.
"""

import hashlib
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("mpistrat/optimizers/kernels.py")
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
SOURCE = Path("build/host_kernels.c")
NODE = Path("mpistrat/comm/node.c")
NODE_DIGEST = hashlib.sha256(NODE.read_bytes()).hexdigest()


class BuildKernels(build_ext):
    """Writes the source of the kernels first. The libraries are no Python modules."""

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
        ),
        Extension(
            "mpistrat.comm._node",
            [str(NODE)],
            define_macros=[("MPISTRAT_DIGEST", f'"{NODE_DIGEST}"')],
            extra_compile_args=FLAGS,
            optional=True,
        ),
    ],
)
