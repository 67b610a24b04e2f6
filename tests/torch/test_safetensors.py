"""Modules of checkpoints as safetensors files, read by the package's own functions."""

import json
import sys
import tracemalloc

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mpistrat as ms  # noqa: E402
import mpistrat.torch as mst  # noqa: E402
from mpistrat.torch.safetensors import _CODES  # noqa: E402
from tests.helpers import Holder  # noqa: E402

nn = torch.nn


class Tied(nn.Module):
    """A decoder whose name comes before that of the embedding it is tied to."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("scalar", torch.tensor(2.5))


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves objects in a checkpoint, and returns the paths of both files."""

    def save(**objects):
        ms.Checkpoint(**objects).write(tmp_path / "run.h5")
        return tmp_path / "run.h5", tmp_path / "model.safetensors"

    return save


def read_by_hand(path):
    """Return the header of a safetensors file, and where its data begin."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def make(dtype):
    values = torch.tensor([0, 1, 1, 0, 1, 1])
    return values.to(getattr(torch, dtype)).reshape(2, 3)


def same_bits(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [each.contiguous().reshape(-1).view(torch.uint8).tolist() for each in (one, other)]
    return bits[0] == bits[1]


def test_a_module_comes_back(saved):
    pytest.importorskip("safetensors")
    model, other = Tied(), Tied()
    checkpoint, path = saved(model=model, optimizer=torch.optim.Adam(model.parameters()))
    assert mst.export_safetensors(checkpoint, path) is None
    tensors = mst.import_safetensors(path)
    own = model.state_dict()
    assert tensors.keys() == own.keys()
    assert all(same_bits(tensors[name], own[name]) for name in own)
    assert tensors["decoder.weight"] is tensors["embedding.weight"]
    other.load_state_dict(tensors)
    assert all(same_bits(value, own[name]) for name, value in other.state_dict().items())


def test_the_packages_own_functions_read_it(saved):
    library = pytest.importorskip("safetensors.torch")
    model = Tied().to(torch.bfloat16)
    checkpoint, path = saved(model=model)
    mst.export_safetensors(checkpoint, path)
    theirs = path.with_name("theirs.safetensors")
    library.save_model(model, theirs, metadata={"format": "pt"})
    (own, begin), (expected, _) = read_by_hand(path), read_by_hand(theirs)
    assert own["__metadata__"] == expected["__metadata__"]
    assert own["__metadata__"] == {"format": "pt", "embedding.weight": "decoder.weight"}
    assert own.keys() == expected.keys()
    assert begin % 8 == 0
    other = Tied().to(torch.bfloat16)
    assert library.load_model(other, path) == (set(), [])
    loaded = library.load_file(path)
    for name, value in library.load_file(theirs).items():
        assert same_bits(loaded[name], value)
        assert same_bits(mst.import_safetensors(theirs)[name], value)
    assert mst.import_safetensors(theirs).keys() == model.state_dict().keys()


@pytest.mark.parametrize("dtype", _CODES)
def test_each_dtype(saved, dtype):
    pytest.importorskip("safetensors")
    model = nn.Module()
    model.register_buffer("x", make(dtype))
    model.register_buffer("other", torch.ones(3, dtype=torch.uint8))
    checkpoint, path = saved(model=model)
    mst.export_safetensors(checkpoint, path)
    try:
        tensors = mst.import_safetensors(path)
    except Exception as error:  # a package that is older than the dtype
        pytest.skip(str(error))
    assert same_bits(tensors["x"], model.x)
    assert same_bits(tensors["other"], model.other)


def test_variables_and_modules_in_a_dict_can_be_exported(saved):
    library = pytest.importorskip("safetensors.torch")
    parts = {"a": Tied(), "b": nn.Linear(2, 2)}
    checkpoint, path = saved(nets=parts, table=ms.Variable(np.arange(3.0), name="table"))
    mst.export_safetensors(checkpoint, path, prefix="nets")
    assert library.load_file(path).keys() == {
        f"{part}/{name}" for part in parts for name in parts[part].state_dict()
    } - {"a/embedding.weight"}
    mst.export_safetensors(checkpoint, path, prefix="nets/b")
    assert library.load_file(path).keys() == {"weight", "bias"}


def test_memory_does_not_grow_with_the_tensors(saved):
    pytest.importorskip("safetensors")
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(2.0**24))  # 64 MiB
    checkpoint, path = saved(model=model)
    tracemalloc.start()
    mst.export_safetensors(checkpoint, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    assert same_bits(mst.import_safetensors(path)["weight"], model.weight.detach())


def test_files_that_others_write_by_the_format(tmp_path):
    """Other programs need not write what a state has besides its arrays."""
    library = pytest.importorskip("safetensors.torch")
    with ms.OneDeviceStrategy().scope():
        ms.Checkpoint(model=Holder({"w": np.arange(3, dtype=np.float32)})).write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["state"].clear()
    mst.export_safetensors(tmp_path / "a.h5", tmp_path / "a.safetensors")
    assert library.load_file(tmp_path / "a.safetensors")["w"].tolist() == [0, 1, 2]


def test_what_safetensors_cannot_hold_is_named(saved):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    model.register_buffer("z", torch.ones(2, dtype=torch.complex128))
    checkpoint, path = saved(model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"'model' in .*run\.h5 also has z \(complex128\)"):
        mst.export_safetensors(checkpoint, path)
    with pytest.raises(TypeError, match=r"param_groups/0/lr, .*\.\.\.\. Save an object without"):
        mst.export_safetensors(checkpoint, path, prefix="optimizer")
    with pytest.raises(ms.errors.CheckpointError, match="below 'model', 'optimizer'"):
        mst.export_safetensors(checkpoint, path, prefix="mode")
    assert not list(path.parent.glob("*safetensors*"))


def test_damage_leaves_no_file(saved):
    model = nn.Linear(64, 64)
    checkpoint, path = saved(model=model)
    with h5py.File(checkpoint, "a") as file:
        file["variables/model/weight"][3, 4] = 0.5
    path.write_text("the old one")
    with pytest.raises(ms.errors.CheckpointCorruptError, match="model/weight"):
        mst.export_safetensors(checkpoint, path)
    assert path.read_text() == "the old one"
    assert {each.name for each in path.parent.iterdir()} == {path.name, checkpoint.name}


def test_without_the_package_an_import_says_what_to_install(saved, monkeypatch):
    checkpoint, path = saved(model=nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    mst.export_safetensors(checkpoint, path)  # the format is simple enough
    with pytest.raises(ImportError, match="pip install safetensors"):
        mst.import_safetensors(path)
