import pytest

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.strategies.destinations import Place, parse_place


@pytest.mark.parametrize("text", ["SUM", "sum", "Sum"])
def test_reduce_op_takes_strings_of_any_case(text):
    assert ms.ReduceOp.parse(text) is ms.ReduceOp.SUM


def test_bad_options():
    for arguments, error in (
        ({"bytes_per_pack": -1}, ValueError),
        ({"bytes_per_pack": 1.5}, TypeError),
        ({"timeout_seconds": 0}, ValueError),
        ({"implementation": "MPI"}, TypeError),
        ({"wire_dtype": "float32"}, ValueError),
        ({"deterministic": 1}, TypeError),
    ):
        with pytest.raises(error):
            ms.CommunicationOptions(**arguments)
    with pytest.raises(NotImplementedError):
        ms.InputOptions(experimental_place_dataset_on_device=True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cpu:0", Place(None, "cpu", 0)),
        ("CPU:0", Place(None, "cpu", 0)),
        ("/cpu:0", Place(None, "cpu", 0)),
        ("/device:GPU:1", Place(None, "gpu", 1)),
        ("cuda:1", Place(None, "gpu", 1)),
        ("/job:worker/task:3/device:GPU:0", Place(3, "gpu", 0)),
        ("/job:worker/replica:0/task:0/device:CPU:0", Place(0, "cpu", 0)),
        (Device("gpu", 1).on_task(2), Place(2, "gpu", 1)),
    ],
)
def test_device_strings(text, place):
    assert parse_place(text, 4) == place


@pytest.mark.parametrize("text", ["", "tpu:0", "cpu:x", "/job:ps/task:0/cpu:0", "/task:4/cpu:0"])
def test_unknown_device_strings(text):
    with pytest.raises(ValueError, match="device"):
        parse_place(text, 4)
