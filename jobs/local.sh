#!/bin/bash
# Train on the digits with several ranks on this machine. Prepares the data if it is missing.
#
#     jobs/local.sh                                  2 ranks
#     RANKS=4 jobs/local.sh --epochs 10 --resume     options go to train_digits.py
#
# PYTHON names the interpreter. The default is ./.venv/bin/python, or `python` on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RANKS=${RANKS:-2}
if ! [[ $RANKS =~ ^[1-9][0-9]*$ ]]; then
    echo "local.sh: RANKS=$RANKS is no number of ranks; use RANKS=1, RANKS=2, ..." >&2
    exit 2
fi
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python; fi
fi
PYTHON=$(command -v "$PYTHON") || { echo "local.sh: there is no python; set PYTHON" >&2; exit 1; }

# The wheel's mpiexec is in the same folder as python; a cluster's own is on PATH.
mpiexec=$(dirname "$PYTHON")/mpiexec
[ -x "$mpiexec" ] || mpiexec=$(command -v mpiexec) || {
    echo "local.sh: there is no mpiexec beside $PYTHON or on PATH" >&2
    exit 1
}
flags=()
if "$mpiexec" --version </dev/null | grep -q "Open MPI"; then
    flags+=(--oversubscribe)
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
fi

data=data/digits.h5
[ -f "$data" ] || "$PYTHON" jobs/prepare_digits.py --output "$data"

# The ranks share the cores. A launcher's pipes hide the terminal from them.
export MPISTRAT_OVERSUBSCRIBE=${MPISTRAT_OVERSUBSCRIBE:-on}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
if [ -t 2 ]; then export FORCE_COLOR=${FORCE_COLOR:-1}; fi
exec "$mpiexec" ${flags[@]+"${flags[@]}"} -n "$RANKS" \
    "$PYTHON" jobs/train_digits.py --data "$data" "$@" </dev/null
