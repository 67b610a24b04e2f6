"""Files of torch's own tests: what passes on gloo passes on mpistrat."""

import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.torch import torch_files

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs expecttest"),
]

SOURCE = Path(os.environ.get("TORCH_SOURCE", "none"), "test", "distributed")
EXAMPLE = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Example(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)

    def test_of_a_name(self):
        self.start()
        self.assertEqual(dist.get_backend(), "gloo")

    def test_that_fails(self):
        self.start()
        self.fail()

    def test_that_sums(self):
        self.start()
        tensor = torch.ones(1) + self.rank
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.tensor([3.0]))

    def test_without_a_group(self):
        pass
"""


def names(outcomes, outcome):
    return {name for name, each in outcomes.items() if each.outcome == outcome}


def test_outcomes_on_both_backends_are_compared(tmp_path):
    file = tmp_path / "distributed" / "test_example.py"
    file.parent.mkdir()
    file.write_text(EXAMPLE)
    on_gloo, on_mpistrat, why = torch_files.compare(file, file.parent)
    assert not why
    assert names(on_gloo, "failed") == {"Example.test_that_fails"}
    assert len(on_gloo) == 4
    assert names(on_mpistrat, "passed") == {"Example.test_that_sums"}
    assert names(on_mpistrat, "failed") == {"Example.test_of_a_name"}
    assert "'mpistrat' != 'gloo'" in on_mpistrat["Example.test_of_a_name"].why


OF_GLOO = {
    "test_c10d_gloo.py": {},
}
"""Files of PyTorch's source, and the tests that need gloo itself, with the reason."""


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SOURCE.is_dir(), reason="TORCH_SOURCE names no source of PyTorch")
@pytest.mark.parametrize("file", OF_GLOO)
def test_what_passes_on_gloo_passes(file):
    _, on_mpistrat, why = torch_files.compare(SOURCE / file, SOURCE)
    assert on_mpistrat, why
    assert names(on_mpistrat, "failed") <= OF_GLOO[file].keys()
