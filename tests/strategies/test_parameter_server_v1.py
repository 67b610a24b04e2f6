"""ParameterServerStrategyV1: whatever is done with it says which strategy to use."""

import copy

import pytest

import mpistrat as ms

USES = {
    "call": lambda: ms.ParameterServerStrategyV1(),
    "call with arguments": lambda: ms.ParameterServerStrategyV1(None, num_ps=1),
    "attribute": lambda: ms.ParameterServerStrategyV1.extended,
    "method": lambda: ms.ParameterServerStrategyV1.scope(),
    "hasattr": lambda: hasattr(ms.ParameterServerStrategyV1, "run"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_refuses_and_names_the_second_version(use):
    with pytest.raises(NotImplementedError, match=r"ParameterServerStrategy\(num_ps"):
        use()


def test_it_can_be_shown():
    assert "ParameterServerStrategyV1" in repr(ms.ParameterServerStrategyV1)
    assert copy.copy(ms.ParameterServerStrategyV1) is not None
