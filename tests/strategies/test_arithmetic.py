"""Fingerprint of the arithmetic: it tells numbers of BLAS threads apart."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import mpistrat as ms
from mpistrat.replicas.arithmetic import fingerprint
print(fingerprint(ms.OneDeviceStrategy("cpu:0").extended.device))
"""


def digest(num_threads):
    """Return the fingerprint of a process whose BLAS has so many threads."""
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(num_threads))
    command = [sys.executable, "-c", _PROGRAM]
    return subprocess.check_output(command, env=os.environ | variables, timeout=60, text=True)


@pytest.mark.launches
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="BLAS has one thread on one core")
def test_fingerprints_differ_with_the_number_of_threads():
    assert digest(1) == digest(1) != digest(2)
