#!/bin/bash
# Install the wheels of a folder, without a network, and report on the GPUs of this machine:
#   tools/gpu_report.sh .whl [arguments of tools.gpu_report]
# PYTHON is the interpreter that has CuPy. Its environment gets the wheels, or a folder if it is not
# writable. The tests run in a copy, because the package in this checkout is not compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD wheels=$(realpath "$1")
shift
python=$(command -v "${PYTHON:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(--quiet --no-index --no-deps --no-cache-dir --force-reinstall)
if ! "$python" -m pip install "${flags[@]}" "$wheels"/*.whl; then
    "$python" -m pip install "${flags[@]}" --target "$work/site" "$wheels"/*.whl
    export PYTHONPATH=$work/site PATH=$work/site/bin:$PATH
    export LD_LIBRARY_PATH=$work/site/lib:${LD_LIBRARY_PATH:-}
fi
export PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
# MPI on a machine without a network, and perhaps without a name.
if ! timeout 60 mpiexec -n 2 "$python" -c "from mpi4py import MPI" 2>/dev/null; then
    export HYDRA_IFACE=lo UCX_NET_DEVICES=lo FI_TCP_IFACE=lo MPICH_INTERFACE_HOSTNAME=localhost
fi
cp -r tests tools pyproject.toml "$work"
cd "$work"
"$python" -m tools.gpu_report --output "$root/gpu-report.md" "$@"
