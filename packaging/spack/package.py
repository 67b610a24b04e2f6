# SPDX-License-Identifier: Apache-2.0
"""Spack package: repos/PACKAGES/py_mpistrat/package.py of a repository of one's own."""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpistrat(PythonPackage):
    """The programming model of tf.distribute for NumPy, CuPy and PyTorch programs on MPI clusters."""

    homepage = "https://github.com/mpistrat/mpistrat"
    url = "https://github.com/mpistrat/mpistrat/releases/download/v0.1.0/mpistrat-0.1.0.tar.gz"
    git = "https://github.com/mpistrat/mpistrat.git"

    license("Apache-2.0", checked_by="mpistrat")

    version("main", branch="main")
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("compression", default=False, description="Filters of hdf5plugin")
    variant("cuda", default=False, description="Replicas on GPUs, by CuPy")
    variant("torch", default=False, description="Backend for torch.distributed")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-setuptools-scm@8:", type="build")
    depends_on("mpi", type="run")
    with default_args(type=("build", "run")):
        depends_on("py-numpy@2.0:", type="build")
        depends_on("py-array-api-compat@1.9:")
        depends_on("py-h5py@3.11:")
        depends_on("py-isal@1.7:", when="target=x86_64:")
        depends_on("py-isal@1.7:", when="target=aarch64:")
        depends_on("py-ml-dtypes@0.5:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-numpy@1.26:")
        depends_on("py-optree@0.14:")
        depends_on("py-rich@13.7:")
        depends_on("py-threadpoolctl@3.5:")
        depends_on("py-xxhash@3.0:")
        depends_on("py-hdf5plugin@5.0:", when="+compression")
        depends_on("py-cupy@14:", when="+cuda")
        depends_on("py-torch@2.7:", when="+torch")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        """Fail where the compiled parts cannot be built."""
        env.set("MPISTRAT_REQUIRE_COMPILED", "1")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def smoke_test(self) -> None:
        """Run the smoke test of the package on one rank."""
        python("-m", "mpistrat.testing", "smoke")
