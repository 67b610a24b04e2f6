"""Each case of `cases`: it ends in time, with the ranks to blame and the lines of code."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.cases import CASES
from tests.faults.running import check, run_case

pytestmark = pytest.mark.launches

SIDE_BY_SIDE = 2


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what becomes of each case that is asked for, by name; several run at a time."""
    folder = tmp_path_factory.mktemp("cases")
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ())
    ]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    yield {
        case.name: pool.submit(run_case, case, folder / str(number))
        for number, case in enumerate(asked)
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(outcomes, case):
    check(case, outcomes[case.name].result())


def test_the_names_of_cases_are_different():
    assert len({case.name for case in CASES}) == len(CASES) >= 20
