"""Objects of PyTorch in checkpoints: their tensors, keys and types, and what is refused."""

import collections
import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.marks import dump_json, load_json
from mpistrat.checkpoint.state_json import join_state, split_state
from mpistrat.testing import launch
from tests.helpers import Holder

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.mpi


@pytest.fixture
def path(strategy, shared_tmp_path):
    """Return a path that is the same on all ranks, in the scope of their strategy."""
    with strategy.scope():
        yield shared_tmp_path / "run.h5"


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and torch.equal(a.resolve_conj(), b)
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, dict):
        return set(map(repr, a)) == set(map(repr, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def round_trip(state):
    """Return what a file makes of a state, without one."""
    rest, arrays = split_state(state, "object")
    text = dump_json(rest)
    json.loads(text, parse_constant=pytest.fail)
    return join_state(load_json(text.encode()), {k: np.array(v) for k, v in arrays.items()})


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def objects(seed):
    module = model(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1 * seed)
    return {
        "model": module,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        "generator": torch.Generator().manual_seed(seed),
    }


def train(found, steps=3):
    for step in range(steps):
        found["optimizer"].zero_grad()
        found["model"](torch.full((5, 3), 0.1 * step + 0.1)).square().sum().backward()
        found["optimizer"].step()
        found["scheduler"].step()
        torch.rand(3, generator=found["generator"])


def states(found):
    return {
        name: each.get_state() if name == "generator" else each.state_dict()
        for name, each in found.items()
    }


@pytest.mark.parametrize("parallel", [False, True])
def test_what_is_trained_on_is_the_same_after_a_restore(path, parallel):
    saved, restored = objects(1), objects(2)
    train(saved)
    ms.Checkpoint(**saved).write(path, parallel=parallel)
    status = ms.Checkpoint(**restored).restore(path)
    status.assert_consumed()
    assert same(states(saved), states(restored))
    train(saved)
    train(restored)
    assert same(states(saved), states(restored))


def test_a_manager_saves_in_the_background(path):
    saved, restored = objects(1), objects(2)
    manager = ms.CheckpointManager(ms.Checkpoint(**saved), path.parent, asynchronous=True)
    train(saved)
    before = copy.deepcopy(states(saved))
    path = manager.save(3)
    train(saved)
    manager.wait()
    ms.Checkpoint(**restored).restore(path).assert_consumed()
    assert same(before, states(restored))


BASE = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "strided": BASE[::2, 1::3],
    "transposed": BASE.T,
    "expanded": torch.ones(1).expand(5),
    "channels last": torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "needs gradient": torch.ones(2, requires_grad=True),
    "bool": torch.tensor([True, False]),
    "uint64": torch.tensor([2**63 + 1], dtype=torch.uint64),
    "complex128": torch.tensor([1j], dtype=torch.complex128),
    "float16": torch.tensor([1.5], dtype=torch.float16),
    "bfloat16": torch.tensor([[1.5, -3e38]], dtype=torch.bfloat16).T,
    "scalar bfloat16": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty bfloat16": torch.empty(0, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_any_dense_tensor_comes_back(name):
    tensor = TENSORS[name]
    result = round_trip({"x": tensor})["x"]
    assert same(tensor.detach(), result)
    assert not result.requires_grad


def test_floats_of_8_bits_come_back_to_the_bit():
    tensor = torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)
    result = round_trip({"x": tensor})["x"]
    assert result.dtype == tensor.dtype
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "state",
    [
        {"state": {0: {"exp_avg": torch.ones(2)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        {None: 1, ("a", 2, (None,)): torch.ones(1), 2.5: None, True: [np.ones(2), None]},
        {"$keys": 1, "x": torch.ones(1), "y": {"$tuple": [1]}, "z": {"$tensor": "float32"}},
        {"tuple": ((), (1, (None, np.ones(1)))), "nan": (float("nan"),), "x": torch.ones(1)},
        {"a/b": torch.ones(1), "a.b": np.ones(1), "none": None, "text": "Zürich"},
        {"list": [torch.ones(1), [None, (torch.zeros(2),)]]},
        {"x": torch.ones(1), "$same": {"$dict": {"$same": "x"}}},
    ],
)
def test_keys_and_types_come_back(state):
    assert same(state, round_trip(state))


def test_tuples_stay_tuples_without_tensors_too(path):
    holder = Holder({"pair": (1, 2), "looks": {"$tuple": [1]}})
    ms.Checkpoint(holder=holder).write(path)
    ms.Checkpoint(holder=holder).restore(path).assert_consumed()
    assert holder.state == {"pair": (1, 2), "looks": {"$tuple": [1]}}


def test_a_file_with_tensors_says_so_in_its_version_and_its_text(path):
    weight = torch.tensor([1.5], dtype=torch.bfloat16)
    ms.Checkpoint(holder=Holder({"w": weight, "tied": weight, 3: (1,)})).write(path)
    with h5py.File(path) as file:
        assert file.attrs["format_version"] == 2
        dataset = file["variables/holder/w"]
        assert dataset.dtype == np.uint16
        assert dataset.attrs["dtype"] == b"bfloat16"
        assert list(file["variables/holder"]) == ["w"]
        assert json.loads(file["state/holder"][()]) == {
            "$keys": [
                ["w", {"$tensor": "bfloat16"}],
                ["tied", {"$same": "w"}],
                [3, {"$tuple": [1]}],
            ]
        }


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def test_tied_weights_are_one_data_set(path):
    saved = Tied()
    ms.Checkpoint(model=saved).write(path)
    with h5py.File(path) as file:
        assert list(file["variables/model"]) == ["a.weight"]
    restored = Tied()
    ms.Checkpoint(model=restored).restore(path).assert_consumed()
    assert torch.equal(restored.b.weight, saved.a.weight)
    assert restored.a.weight is restored.b.weight


def test_views_that_overlap_otherwise_are_stored_each():
    base = torch.arange(4.0)
    arrays = split_state({"all": base, "part": base[1:], "again": base.view(2, 2)}, "object")[1]
    assert list(arrays) == ["all", "part", "again"]
    assert same({"all": base, "part": base[1:]}, round_trip({"all": base, "part": base[1:]}))


def test_a_module_on_the_meta_device_takes_the_tensors_over(path):
    saved = nn.ModuleList([model(1), Tied()])
    ms.Checkpoint(model=saved).write(path)
    with torch.device("meta"):
        restored = nn.ModuleList([model(2), Tied()])
    restored[0][0].weight.requires_grad_(False)
    ms.Checkpoint(model=restored).restore(path).assert_consumed()
    assert same(saved.state_dict(), restored.state_dict())
    assert restored[1].a.weight is restored[1].b.weight
    assert isinstance(restored[0][2].bias, nn.Parameter)
    assert not restored[0][0].weight.requires_grad
    assert not restored[0][1].num_batches_tracked.requires_grad
    with pytest.raises(TypeError, match=r"'model' holds a tensor on the meta device.*0\.weight"):
        ms.Checkpoint(model=model(1).to("meta")).write(path)


def test_a_save_neither_copies_nor_pins_the_memory_of_a_module():
    weight = torch.zeros(4)
    arrays = split_state({"w": weight}, "object")[1]
    array = np.asarray(arrays["w"])
    assert array.__array_interface__["data"][0] == weight.data_ptr()
    weight.untyped_storage().resize_(0)  # which Tensor.numpy() would make impossible


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_is_saved_as_the_module(path):
    saved, restored = torch.compile(model(1)), model(2)
    ms.Checkpoint(model=saved).write(path)
    ms.Checkpoint(model=restored).restore(path).assert_consumed()
    assert same(dict(restored.state_dict()), dict(saved._orig_mod.state_dict()))


def test_a_counter_inside_of_a_scheduler_is_one_again(path):
    optimizer = objects(1)["optimizer"]
    scheduler = torch.optim.lr_scheduler
    found = scheduler.SequentialLR(
        optimizer, [scheduler.ConstantLR(optimizer), scheduler.MultiStepLR(optimizer, [2])], [2]
    )
    ms.Checkpoint(scheduler=found).write(path)
    ms.Checkpoint(scheduler=found).restore(path).assert_consumed()
    assert type(found._schedulers[1].milestones) is collections.Counter


def test_a_bare_tensor_is_refused_with_the_remedy():
    for given in (torch.ones(2), [nn.Parameter(torch.ones(2))]):
        with pytest.raises(TypeError, match=r"(Tensor|Parameter): it takes .*Wrap"):
            ms.Checkpoint(weight=given).write("never.h5")


def refused(found, path, *lines):
    """Check that a restore names `lines`, and changes nothing."""
    before = copy.deepcopy({name: each.state_dict() for name, each in found.items()})
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        ms.Checkpoint(**found).restore(path)
    for line in lines:
        assert f"\n  {line}\n" in str(caught.value)
    assert str(caught.value).count("\n  ") == len(lines)
    for name, each in found.items():
        assert same(before[name], each.state_dict())


def test_all_that_does_not_fit_a_module_is_named_and_nothing_changes(path):
    ms.Checkpoint(first=nn.Linear(3, 4), second=nn.Linear(2, 2)).write(path)
    other = nn.Linear(3, 5)
    other.bias = nn.Parameter(other.bias[:4].bfloat16())
    other.register_buffer("mean", torch.zeros(2))
    refused(
        {"first": other, "second": nn.Linear(2, 2, bias=False)},
        path,
        "first/weight: float32 of shape (4, 3) in the file, float32 of shape (5, 3) in the program",
        "first/bias: float32 of shape (4,) in the file, bfloat16 of shape (4,) in the program",
        "first/mean: missing in the file, float32 of shape (2,) in the program",
        "second/bias: float32 of shape (2,) in the file, missing in the program",
    )


def test_an_optimizer_is_compared_by_its_groups(path):
    module = model(1)
    ms.Checkpoint(model=module, optimizer=torch.optim.SGD(module.parameters())).write(path)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters()}]
    refused(
        {"model": module, "optimizer": torch.optim.SGD(groups, lr=0.1)},
        path,
        "optimizer/param_groups: groups of [6] parameters in the file, of [2, 2] in the program",
    )


def test_an_optimizer_that_has_made_no_step_gets_its_state(path):
    found, other = objects(1), objects(2)
    ms.Checkpoint(**other).write(path.with_name("new.h5"))
    train(found)
    ms.Checkpoint(**found).write(path)
    ms.Checkpoint(**other).restore(path).assert_consumed()
    assert same(states(found), states(other))
    ms.Checkpoint(**found).restore(path.with_name("new.h5")).assert_consumed()
    assert found["optimizer"].state_dict()["state"] == {}


def test_an_object_that_is_not_in_the_file_stays_and_is_named(path):
    ms.Checkpoint(model=model(1)).write(path)
    found = objects(2)
    before = copy.deepcopy(found["optimizer"].state_dict())
    status = ms.Checkpoint(model=found["model"], optimizer=found["optimizer"]).restore(path)
    assert same(before, found["optimizer"].state_dict())
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"optimizer \(state\)"):
        status.assert_consumed()


class Refuses(Holder):
    def load_state_dict(self, state):
        if state["value"] == 1:
            raise RuntimeError("not this one")


def test_what_refuses_its_state_undoes_the_others(path):
    found, last = objects(1), Refuses({"value": 1})
    train(found)
    ms.Checkpoint(**found, last=last).write(path)
    train(found)
    last.state = {"value": 2}
    before = copy.deepcopy(states(found))
    with pytest.raises(ms.errors.CheckpointMismatchError, match="not this one"):
        ms.Checkpoint(**found, last=last).restore(path)
    assert same(before, states(found))


class RefusesAll(Holder):
    """Takes nothing, neither what is new nor what it had."""

    def load_state_dict(self, state):
        raise RuntimeError(f"not {state['value']}")


def test_what_refuses_even_its_own_state_is_named_with_both_errors(path):
    module, before = nn.Linear(2, 2), Holder({"value": 5})
    ms.Checkpoint(model=module, before=before, last=RefusesAll({"value": 1})).write(path)
    before.state = {"value": 6}
    own = copy.deepcopy(module.state_dict())
    nn.init.zeros_(module.weight)
    changed = copy.deepcopy(module.state_dict())
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        ms.Checkpoint(model=module, before=before, last=RefusesAll({"value": 2})).restore(path)
    said = str(caught.value)
    assert "'last' does not accept its state" in said
    assert "RuntimeError: not 1. Its restore cannot be reversed" in said
    assert "\n  'last': RuntimeError: not 2\n" in said
    assert "All others are unchanged" in said
    assert before.state == {"value": 6}
    assert same(changed, module.state_dict())
    assert not same(own, module.state_dict())


class Picky(nn.Linear):
    """A module of the user's own that refuses what it has copied."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if state_dict[f"{prefix}weight"].sum() == 4:
            raise RuntimeError("no ones")


def refuse_ones(module, incompatible):
    if module.weight.sum() == 4:
        raise RuntimeError("no ones")


@pytest.mark.parametrize("is_hook", [True, False])
def test_a_module_that_refuses_is_undone(path, is_hook):
    module, holder = nn.Linear(2, 2) if is_hook else Picky(2, 2), Holder({"value": 1})
    if is_hook:
        module.register_load_state_dict_post_hook(refuse_ones)
    nn.init.ones_(module.weight)
    ms.Checkpoint(model=module, holder=holder).write(path)
    nn.init.zeros_(module.weight)
    holder.state = {"value": 2}
    with pytest.raises(ms.errors.CheckpointMismatchError, match="no ones. Nothing has been"):
        ms.Checkpoint(model=module, holder=holder).restore(path)
    assert not module.weight.any()
    assert holder.state == {"value": 2}


def test_an_optimizer_gets_the_tensors_that_it_had_where_another_object_refuses(path):
    found, last = objects(1), Refuses({"value": 1})
    train(found)
    ms.Checkpoint(optimizer=found["optimizer"], last=last).write(path)
    train(found)
    last.state = {"value": 2}
    slots = found["optimizer"].state
    before = {id(key): {name: id(each) for name, each in slots[key].items()} for key in slots}
    with pytest.raises(ms.errors.CheckpointMismatchError, match="not this one"):
        ms.Checkpoint(optimizer=found["optimizer"], last=last).restore(path)
    slots = found["optimizer"].state
    assert before == {
        id(key): {name: id(each) for name, each in slots[key].items()} for key in slots
    }


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"object": object()}

    def set_extra_state(self, state):
        pass


class Subclass(torch.Tensor):
    pass


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2).to_sparse(), "a sparse tensor of layout torch.sparse_coo"),
        (quantized, "a quantized tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "a nested tensor"),
        (lambda: torch.ones(2).as_subclass(Subclass), "a Subclass, a subclass of Tensor"),
        (lambda: torch.ones(2, dtype=torch.complex32), "dtype complex32"),
        (nn.UninitializedParameter, "a parameter without a shape"),
        (object, "a object at 'deep/0/x'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_stored_is_refused_with_its_path(make, words):
    state = {"w": torch.ones(1), "deep": [{"x": make()}]}
    with pytest.raises(TypeError, match=r"'thing' holds .* at 'deep/0/x'\.") as caught:
        split_state(state, "thing")
    assert words in str(caught.value)


def test_extra_state_with_objects_is_refused(path):
    with pytest.raises(TypeError, match="holds a object at '1._extra_state/object'"):
        ms.Checkpoint(model=nn.Sequential(nn.ReLU(), WithExtraState(2, 2))).write(path)


def test_modules_are_saved_from_rank_0_and_generators_must_agree(strategy, path):
    rank, size = strategy.extended._collectives.rank, strategy.extended._collectives.size
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.bias)
    nn.init.constant_(module.weight, rank)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        ms.Checkpoint(model=module).write(path)
    drifts = [each for each in given if each.category is ms.errors.ReplicaDriftWarning]
    assert len(drifts) == (size > 1)
    assert all("'model/weight' on rank" in str(each.message) for each in drifts)
    ms.Checkpoint(model=module).restore(path).assert_consumed()
    assert not module.weight.any()
    generator = torch.Generator().manual_seed(rank)
    expected = torch.Generator().manual_seed(rank).get_state()
    if size > 1:
        with pytest.raises(ms.errors.CheckpointError, match="generator: differs"):
            ms.Checkpoint(generator=generator).write(path)
    own = ms.Checkpoint(generator=ms.PerReplicaState(generator))
    own.write(path)
    generator.manual_seed(99)
    own.restore(path).assert_consumed()
    assert torch.equal(generator.get_state(), expected)


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_of_a_process_group_saves_without_a_scope(tmp_path, ranks):
    program = Path(__file__).parent / "programs" / "saves.py"
    result = launch.run([program, tmp_path / "run.h5"], ranks)
    assert result.returncode == 0, result.stderr


@pytest.mark.launches
def test_without_mpi_rank_0_alone_writes(tmp_path):
    """A program that forgot to make a process group, or has one of another backend."""
    program = """
import torch
import mpistrat as ms
from mpistrat.mpi.launcher import find_launcher

ms.Checkpoint(model=torch.nn.Linear(2, 3)).write(f"by-rank-{find_launcher().task}.h5")
"""
    result = launch.run(["-c", program], 3, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [each.name for each in tmp_path.glob("*.h5")] == ["by-rank-0.h5"]


@pytest.mark.launches
def test_shards_are_saved_as_one_and_restored_on_any_number_of_ranks(tmp_path):
    program = Path(__file__).parent / "programs" / "shards.py"
    for what, ranks in (("save", 2), ("restore", 3), ("restore", 1)):
        result = launch.run([program, what, tmp_path / "run.h5"], ranks)
        assert result.returncode == 0, result.stderr


@pytest.mark.launches
def test_numpy_programs_and_imports_stay_without_torch():
    code = (
        "import sys, numpy as np, mpistrat as ms\n"
        "ms.Checkpoint(rng=np.random.default_rng(0)).write('/dev/null/x') if 0 else None\n"
        "from mpistrat.checkpoint.state_json import split_state\n"
        "split_state({'a': np.ones(2), 'b': [1]}, 'o')\n"
        "assert 'torch' not in sys.modules and 'mpistrat.torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        b'{"$tuple": 1}',
        b'{"$keys": [1]}',
        b'{"$keys": [[1]]}',
        b'{"$tensor": 1}',
        b'{"$same": null}',
    ],
)
def test_broken_marks_are_refused(text):
    with pytest.raises(ValueError, match="is neither a number nor a dict"):
        load_json(text)


@pytest.mark.parametrize(
    ("text", "arrays", "words"),
    [
        (b'{"x": {"$tensor": "float32"}}', {}, "no array for the tensor 'x'"),
        (b'{"x": {"$tensor": "float32"}}', {"x": np.ones(1)}, "float64 was stored for a tensor of"),
        (b'{"x": {"$tensor": "load"}}', {"x": np.ones(1)}, "stored for a tensor of load"),
        (b'{"x": {"$same": "y"}}', {}, "'x' is tied to 'y', which is no tensor"),
        (b'{"$keys": [[[1], 2]]}', {}, "is no key of a dict"),
        (b'{"$keys": [[{"$tensor": "x"}, 2]]}', {}, "is no key of a dict"),
    ],
)
def test_marks_without_a_meaning_are_refused(text, arrays, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        join_state(load_json(text), arrays)
