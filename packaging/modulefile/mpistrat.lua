-- Lmod module of an installation in a virtual environment:
--     python -m venv /opt/mpistrat/0.1.0
--     /opt/mpistrat/0.1.0/bin/pip install "mpistrat==0.1.0"
local version = "0.1.0"
local root = pathJoin("/opt/mpistrat", version)

help([[The programming model of tf.distribute for NumPy, CuPy and PyTorch programs on MPI clusters.
python -m mpistrat.testing smoke tries the installation.]])
whatis("Name: mpistrat")
whatis("Version: " .. version)
whatis("URL: https://github.com/mpistrat/mpistrat")

conflict("mpistrat")
-- The MPI library of the site, for which mpi4py looks in LD_LIBRARY_PATH.
depends_on(os.getenv("MPISTRAT_MPI_MODULE") or "openmpi")

prepend_path("PATH", pathJoin(root, "bin"))
setenv("MPISTRAT_ROOT", root)
