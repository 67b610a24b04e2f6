"""Format version 2, kept as a file: each later version of mpistrat must read it.

``files/v2_tensors.h5`` was written by `write_golden`. From the first release on it is never written
again: a change of the format gets its own number and file.
"""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cli import main

torch = pytest.importorskip("torch")

GOLDEN = Path(__file__).parent / "files" / "v2_tensors.h5"

WEIGHT = torch.arange(6.0).reshape(2, 3) / 8
BIAS = torch.tensor([1.5, -2], dtype=torch.bfloat16)
MOMENTUM = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 3)
        self.head = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(0))


class Notes:
    """An object with tensors and with what JSON does not have."""

    state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


NOTES = {
    "rows": [torch.tensor([True, False]), (1, None, float("inf"))],
    "small": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
    (0, "a"): {None: torch.empty(0, 2), 2.5: np.float32([1, 2])},
    "looks": {"$tuple": [1]},
    "text": "Zürich",
}


def objects():
    model = Model()
    optimizer = torch.optim.SGD([model.head.bias], lr=0.5, momentum=0.75)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 40])
    notes = Notes()
    notes.state = {}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "notes": notes}


def write_golden(path):
    """How the file was written, on one rank."""
    found = objects()
    with torch.no_grad():
        found["model"].embedding.weight.copy_(WEIGHT)
        found["model"].head.bias.copy_(BIAS)
        found["model"].count += 42
    bias = found["model"].head.bias
    found["optimizer"].state[bias]["momentum_buffer"] = MOMENTUM
    found["notes"].state = NOTES
    ms.Checkpoint(**found).write(path)


def test_the_golden_file_is_restored(strategy):
    found = objects()
    with strategy.scope():
        ms.Checkpoint(**found).restore(GOLDEN).assert_consumed()
    model = found["model"]
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, WEIGHT)
    assert torch.equal(model.head.bias, BIAS)
    assert model.count == 42
    assert torch.equal(found["optimizer"].state[model.head.bias]["momentum_buffer"], MOMENTUM)
    assert found["scheduler"].milestones == {2: 1, 40: 1}
    notes = found["notes"].state
    assert notes.keys() == NOTES.keys()
    assert torch.equal(notes["rows"][0], NOTES["rows"][0])
    assert notes["rows"][1] == NOTES["rows"][1]
    assert torch.equal(notes["small"].view(torch.uint8), NOTES["small"].view(torch.uint8))
    assert notes[0, "a"][None].shape == (0, 2)
    assert notes[0, "a"][2.5].tolist() == [1, 2]
    assert notes["looks"] == {"$tuple": [1]}


def contents(path):
    """Return the arrays and states of a file as the document describes them."""
    arrays, states = {}, {}

    def take(name, node):
        if isinstance(node, h5py.Dataset) and name.startswith("variables/"):
            values = np.asarray(node[()])
            arrays[name] = values.dtype, values.tolist(), node.attrs.get("dtype")
        elif isinstance(node, h5py.Dataset):
            states[name] = json.loads(node[()]), sorted(node.attrs["arrays"])

    with h5py.File(path) as file:
        assert file.attrs["format_version"] == 2
        file.visititems(take)
    return arrays, states


@pytest.mark.launches
def test_what_is_written_today_is_the_golden_file(tmp_path, capsys):
    write_golden(tmp_path / "new.h5")
    arrays, states = contents(tmp_path / "new.h5")
    golden_arrays, golden_states = contents(GOLDEN)
    assert arrays == golden_arrays
    # Newer versions of PyTorch may add keys to the states of optimizers and schedulers.
    for name in ("state/model", "state/notes"):
        assert states[name] == golden_states[name]
    assert main(["verify", str(GOLDEN)]) == 0


@pytest.mark.launches
def test_the_commands_show_the_file_well(capsys):
    assert main(["inspect", str(GOLDEN), "--stats"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert lines["model/head.bias"][2:3] + lines["model/head.bias"][-4:] == [
        "bfloat16",
        "-2",
        "1.5",
        "-0.25",
        "0",
    ]
    assert lines["notes/small"][2] == "float8_e4m3fn"
    assert lines["optimizer/state/0/momentum_buffer"][1] == "(2,)"
    assert "$tensor" not in shown
    assert '"milestones": {"2": 1, "40": 1}' in shown
    assert "same as embedding.weight" in shown


@pytest.mark.launches
def test_differences_are_named(tmp_path, capsys):
    path = tmp_path / "other.h5"
    found = objects()
    ms.Checkpoint(**found).restore(GOLDEN)
    with torch.no_grad():
        found["model"].head.bias[0] = 2
    found["optimizer"].param_groups[0]["lr"] = 0.125
    ms.Checkpoint(**found).write(path)
    assert main(["diff", str(GOLDEN), str(path)]) == 1
    shown = capsys.readouterr().out
    assert "largest difference 0.5, in 1 of 2 elements" in shown
    assert "optimizer/param_groups[0]/lr" in shown
    assert "0.5 in a, 0.125 in b" in shown
    assert "2 paths differ" in shown
