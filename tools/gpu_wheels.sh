#!/bin/bash
# Collect in .whl/ what `make gpu-report WHEELS=.whl` installs on a machine without a network: this
# package, an MPI library, and what a CUDA image with PyTorch, CuPy and h5py lacks. Needs a network,
# but no GPU. PYTHON_VERSION is that of the other machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${PY:-.venv/bin/python}
version=${PYTHON_VERSION:-3.12}
rm -rf .whl && mkdir .whl
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
done
"$PY" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" -d .whl \
    mpich mpi4py optree isal array-api-compat pytest-mpi expecttest
"$PY" -m pip wheel --quiet --no-deps --no-build-isolation -w .whl .
ls .whl
