"""Lightning Fabric and Accelerate on the group: collectives, loaders, steps, checkpoints."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "package"), [("fabric", "lightning"), ("accelerate",) * 2])
def test_its_features(name, package, ranks, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    result = launch.run(["-W", "ignore", PROGRAMS / f"{name}_features.py", tmp_path], ranks, 100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is done") == ranks
    assert "Error" not in result.stderr
